"""Hardware profiles: what is recommended on which machine, as data, with the source of every figure.

A profile never refuses anything and never knows a model's shape: it says what to choose where neither an option, the
environment nor config.yaml has said so. Shipped ones are `profiles/*.yaml`, a user's own lie in the data directory
(`files`); `choice` picks the one that matches this machine best. The keys of a file: docs/profiles.md.
"""

from magicpig_cli.profiles.choice import choose
from magicpig_cli.profiles.files import broken_user_profiles, find, load, save, shipped, user_folder, user_profiles
from magicpig_cli.profiles.profile import BUILT_IN, Match, Profile, TableSize

__all__ = [
    "BUILT_IN", "Match", "Profile", "TableSize",
    "broken_user_profiles", "choose", "find", "load", "save", "shipped", "user_folder", "user_profiles",
]  # fmt: skip
