"""A conversation on a terminal: `loop` reads lines, `state` answers them, `commands` does what begins with a slash."""
