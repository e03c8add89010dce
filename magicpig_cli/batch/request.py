"""From a line to what the engine takes: token ids and the parameters of its answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from magicpig_cli.batch.line import INVALID_REQUEST, BadLine, Line
from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.engine.documents import document_message, read_document
from magicpig_cli.engine.sampling import resolve_sampling
from magicpig_cli.errors import MagicpigError
from magicpig_cli.planner import Plan
from magicpig_cli.planner.memory import too_large

INVALID_FILE, NO_TEMPLATE, TOO_LONG = "invalid_file", "no_chat_template", "context_length_exceeded"
INSUFFICIENT_MEMORY = "insufficient_memory"
_SEED_BYTES = 4  # short to type again, exact in any JSON reader


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a line asks, as the model takes it.

    digest: changes with the line's text, the text of its document and the parameters that the line gives. It does not
    see how these are written down, nor the token ids: a template may tell the model today's date.
    """

    ids: list[int]
    digest: str


@dataclass(frozen=True)
class RequestMaker:
    """Everything that turns lines into requests. `defaults` and `system` come from the command line.

    longest: tokens that a sequence may have, as the model or -c says; the plan's context is shorter where memory is.
    raw: prompts are sent as they are, without chat template. directory: where documents are. identity: what decides
    the answers of all lines, the model above all, as a digest.

    Lines without an id may ask the same thing: `twin` counts those that come before, from 0.
    """

    codec: ChatCodec
    generation_config: Any
    plan: Plan
    longest: int
    defaults: GenerationOptions
    system: str | None
    raw: bool
    directory: Path
    allow_outside_files: bool
    identity: str

    def read(self, line: Line) -> Prompt:
        """The line's prompt, its document read. Raises BadLine."""
        try:
            content = self._content(line, self._document(line))
            ids = self.codec.encode_raw(content) if isinstance(content, str) else self.codec.encode_chat(content)
        except BadLine:
            raise
        except MagicpigError as problem:
            raise BadLine(INVALID_REQUEST, problem.message) from problem
        if not ids:
            raise BadLine(INVALID_REQUEST, "the prompt has no tokens")
        wanted = self._parameters(line).max_tokens
        if len(ids) + (wanted or 1) > self.longest:
            asked = f" + {wanted:,} answer tokens" if wanted else ""
            raise BadLine(
                TOO_LONG, f"{len(ids):,} prompt tokens{asked} do not fit the context of {self.longest:,} tokens"
            )
        return Prompt(ids, _digest([content, asdict(line.options)]))

    def options(self, line: Line, prompt: Prompt, twin: int) -> GenerationOptions:
        """The line's parameters over those of the command line, with a seed of its own.

        The seed is the line's, else a hash of its id, or of what it asks where it has none, so that neighbours and
        order do not matter; another `--seed` gives other answers to all lines.
        """
        if line.options.seed is not None:
            own = line.options.seed
        else:
            own = _hashed(line.custom_id if line.named else f"{prompt.digest} {twin}")
        seed = own ^ _hashed(str(self.defaults.seed)) if self.defaults.seed else own
        return replace(self._parameters(line), seed=seed)

    def sequence_tokens(self, line: Line, prompt_tokens: int) -> int:
        """How long the sequence may become. Raises BadLine if there is no memory for that."""
        asked = prompt_tokens + (self._parameters(line).max_tokens or 1)
        wanted = resolve_sampling(self._parameters(line), self.generation_config).max_tokens
        tokens = min(prompt_tokens + wanted, self.plan.context)
        if asked > self.plan.context or self.plan.sequence_bytes(tokens) > self.plan.budget_bytes:
            raise BadLine(INSUFFICIENT_MEMORY, too_large(self.plan, max(asked, tokens)))
        return tokens

    def key(self, line: Line, prompt: Prompt, twin: int) -> bytes:
        """16 bytes that change with everything that decides the answer: model, text, parameters, the line's own id.

        No two lines of an input have the same. How much memory is free just then makes no difference.
        """
        sampling = resolve_sampling(self.options(line, prompt, twin), self.generation_config)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.longest - len(prompt.ids)))
        name = line.custom_id if line.named else twin
        return bytes.fromhex(_digest([self.identity, name, prompt.digest, asdict(sampling)]))

    def _parameters(self, line: Line) -> GenerationOptions:
        said = {field.name: value for field in fields(line.options) if (value := getattr(line.options, field.name))
                not in (None, ())}  # fmt: skip
        return replace(self.defaults, **said)

    def _content(self, line: Line, document: tuple[str, str] | None) -> str | list[dict[str, Any]]:
        """Text that is sent as it is, or the messages of a conversation."""
        if line.prompt is not None:
            text = document_message([document], line.prompt) if document else line.prompt
            if self.raw:
                if line.system is not None:
                    raise BadLine(INVALID_REQUEST, "system: it needs the chat template, and --raw goes without")
                return text
            return self._with_system(line, [{"role": "user", "content": text}])
        assert line.messages is not None
        if not self.codec.has_template:
            raise BadLine(NO_TEMPLATE, "messages: the model has no chat template; --chat-template FILE gives it one")
        messages = _with_document(line.messages, document) if document else line.messages
        return self._with_system(line, messages)

    def _with_system(self, line: Line, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The line's own system text, wherever it says it, comes before the command line's."""
        has_one = any(message["role"] in ("system", "developer") for message in messages)
        if has_one and line.system is not None:
            raise BadLine(INVALID_REQUEST, "system: there is a system message too; give one of them")
        system = line.system if line.system is not None else self.system
        return messages if has_one or not system else [{"role": "system", "content": system}, *messages]

    def _document(self, line: Line) -> tuple[str, str] | None:
        """(name, text) of the line's document. Raises BadLine."""
        if line.file is None:
            return None
        try:
            path = (self.directory / line.file).resolve()
            if not self.allow_outside_files and not path.is_relative_to(self.directory.resolve()):
                raise BadLine(
                    INVALID_FILE, f"file: {line.file} is outside the input's directory; --allow-outside-files allows it"
                )
            if path.exists() and not path.is_file() and not path.is_dir():
                raise BadLine(INVALID_FILE, f"file: {line.file} is not a regular file")
            return path.name, read_document(str(path))
        except BadLine:
            raise
        except MagicpigError as problem:
            raise BadLine(INVALID_FILE, f"file: {problem.message}") from problem
        except (OSError, ValueError, RuntimeError) as problem:  # too long, a zero byte, links in a circle
            raise BadLine(INVALID_FILE, f"file: {line.file!r} is no path: {problem}") from problem


def _digest(content: Any) -> str:
    """32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=_SEED_BYTES).digest(), "big")


def _with_document(messages: list[dict[str, Any]], document: tuple[str, str]) -> list[dict[str, Any]]:
    """The document goes into the first user message, before its text."""
    place = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        raise BadLine(INVALID_REQUEST, "file: there is no user message that it could go into")
    content = messages[place]["content"]
    if isinstance(content, str):
        content = document_message([document], content)
    else:
        content = [{"type": "text", "text": document_message([document], "") + "\n"}, *content]
    return [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]
