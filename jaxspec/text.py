"""Text in and out: the checkpoint's tokenizer and chat template, and detokenizing while tokens still arrive."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# How much of what is already shown is decoded again beside new tokens. A decoder may treat the first token of its input differently (strip
# its leading space, say), and a character has at most 4 bytes, so 8 tokens back nothing of that can reach the new ones.
CONTEXT_TOKENS = 8
CALLS = ("tool_calls", "tool_responses")  # what a message may have in place of content
THOUGHTS = ("<|channel>", "<channel|>")  # what thoughts stand between
INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no character (yet)


class Tokenizer:
    """A checkpoint's tokenizer, as transformers loads it from the checkpoint's folder.

    bos_token_id, eos_token_id, pad_token_id: int, or None where the tokenizer has none. A model may stop at more ids than eos_token_id:
    those are in its config. vocab_size: number of ids with a token, added tokens counted; a model's embedding may have more rows.
    """

    def __init__(self, hf_tokenizer, folder: Path):
        self._hf = hf_tokenizer
        self._folder = folder
        backend = hf_tokenizer.backend_tokenizer
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.pad_token_id: int | None = hf_tokenizer.pad_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.byte_ids = _byte_ids(backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of text, with the special tokens that the checkpoint's tokenizer adds (Gemma: bos first, unless the text itself
        begins with it, as that of a chat template does). Raises TypeError, and ValueError for half of a surrogate pair, which is no
        character."""
        if not isinstance(text, str):
            raise TypeError(f"encode() takes one str, found {type(text).__name__}")
        _check_characters(text)
        ids = self._hf.encode(text)
        return ids[1:] if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2 else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Special tokens and ids without a token are left out; bytes that are no UTF-8 character become U+FFFD."""
        # Through the backend: the clean-up that transformers may do after it is not local, so text could not be streamed.
        return self._hf.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def thoughts(self, ids: Sequence[int]) -> str:
        """What `decode` gives of the thoughts that an output begins with, "" where it begins with none. Later turns of a conversation are
        not to see them, and without the tokens around them a chat template cannot tell them from the answer."""
        opening, closing = map(self._hf.backend_tokenizer.token_to_id, THOUGHTS)
        if opening is None or not ids or ids[0] != opening:
            return ""
        return self.decode(ids[: ids.index(closing) if closing in ids else len(ids)])

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special tokens too; "" for an id without a token."""
        return self._hf.backend_tokenizer.decode([int(token_id)], skip_special_tokens=False)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of text without any special tokens around it. Raises ValueError as `encode` does."""
        _check_characters(text)
        return self._hf.encode(text, add_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """False for what decode() leaves out: special tokens, and ids without a token (a padded vocabulary has some)."""
        return token_id not in self._special_ids and self._hf.backend_tokenizer.id_to_token(token_id) is not None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs) -> list[int]:
        """Token ids of a conversation, by the checkpoint's chat template.

        messages: mappings with "role" and "content", oldest first. add_generation_prompt: end with the opening of the model's turn.
        kwargs go to the template (tools=..., enable_thinking=...). ValueError if there is no template, no message, a message without a
        role or with no content but text, tool calls or their responses, or if the template refuses the conversation.
        """
        if self._hf.chat_template is None:
            raise ValueError(
                f"{self._folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "it is not a chat checkpoint; use generate() with plain text, or an instruction-tuned checkpoint"
            )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            example = [{"role": "user", "content": "Hi"}]
            raise ValueError(f"chat takes a list of at least one message, such as {example}, found {messages!r}")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"message {i} is {message!r}, expected a dict with 'role' and 'content'")
            _check_content(i, message)
        conversation = [dict(message) for message in messages]
        try:
            return self._hf.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, return_dict=False, **kwargs)
        except Exception as error:  # a template is the checkpoint's code, and raises what it likes, TemplateError above all
            raise ValueError(f"the chat template of {self._folder} refused the conversation: {error}") from error


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint in a local folder: tokenizer.json, and tokenizer_config.json and chat_template.jinja where present.

    Nothing is downloaded and no code from the folder is run. FileNotFoundError names the file that is missing.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        found = f"it has {_listing(folder)}" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{folder} has no tokenizer.json: {found}. Every release has that file: copy it from there")
    _check_names(folder)
    auto_tokenizer = _auto_tokenizer()
    try:
        hf_tokenizer = auto_tokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the parser's errors are of many types, bare Exception among them
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from error
    return Tokenizer(hf_tokenizer, folder)


def _check_names(folder: Path) -> None:
    """Raises ValueError if tokenizer_config.json names a tokenizer file elsewhere, which transformers would read."""
    path = folder / "tokenizer_config.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("fast_tokenizer_files") or ()
    except (OSError, ValueError, AttributeError):
        return  # transformers says what is wrong with it
    outside = [name for name in names if Path(str(name)).name != name]
    if outside:
        raise ValueError(f"{path} names {outside[0]!r}, which is outside its folder")


class IncrementalDetokenizer:
    """Detokenizes one sequence while it grows: the pieces, in order, make up tokenizer.decode of all its ids.

    A piece never ends inside a character. Bytes that are no complete character yet are held back, and so is a whole run of byte tokens
    (<0xE2>...) until another token ends it: only then is it known whether the run is text. The cost of a push depends on how much is
    pushed, not on how long the sequence is.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last ids before _run; all but the last few leave as soon as their text is out
        self._run: list[int] = []  # byte tokens at the end, all held back
        self._shown = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids, any number of them; returns the text that is now certain and was not returned before, "" if none."""
        fresh = False
        for i in filter(self._tokenizer.has_text, map(int, ids)):
            self._run.append(i)
            if i not in self._tokenizer.byte_ids:
                self._window += self._run
                self._run = []
                fresh = True
        if not fresh:
            return ""
        text = self._tokenizer.decode(self._window)
        held = text.endswith(INCOMPLETE)  # of several, only the last can still become a character
        piece = text[self._shown : len(text) - held]
        if len(self._window) > CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            text = self._tokenizer.decode(self._window)
        self._shown = len(text) - held
        return piece

    def flush(self) -> str:
        """The text that was still held back, at the end of the sequence. Afterwards the object is ready for another sequence."""
        piece = self._tokenizer.decode(self._window + self._run)[self._shown :]
        self._window, self._run, self._shown = [], [], 0
        return piece


class OutputText:
    """The text of one sequence while it grows, up to the first stop string.

    stop: strings that end the text, looked for across tokens, but not in what the first `min_tokens` tokens complete. include_stop: end
    behind the string rather than before it. found: the string that ended the text, or None. tokens: how many ids were taken; none is
    taken after the one that completed a stop string. text: all of it so far; of what `push` returns, none is ever taken back. The cost
    of a push depends on how much is pushed and on the stop strings, not on how long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0):
        self._pieces = IncrementalDetokenizer(tokenizer)
        self._stop, self._include, self._min_tokens = tuple(stop), include_stop, min_tokens
        # How much of a stop string may stand before the piece that completes it. It is not to be shown if the string is not.
        self._reach = max(map(len, stop), default=1) - 1
        self._held = 0 if include_stop else self._reach
        self._shown, self._fresh = list[str](), list[str]()  # the text in pieces: what `push` returned, and what it did not
        self._end = ""  # the last characters of the text, as many as reach
        self.tokens, self.found = 0, None

    @property
    def text(self) -> str:
        return "".join([*self._shown, *self._fresh])

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids until a stop string; returns the text that is certain and was not returned before."""
        if not self._stop:
            self.tokens += len(ids)
            self._fresh.append(self._pieces.push(ids))
        else:
            for i in ids:
                if self.found is not None:
                    break
                self.tokens += 1
                self._extend(self._pieces.push([i]))
        return self._show(0 if self.found is not None else self._held)

    def finish(self) -> str:
        """The rest of the text, at the end of the sequence."""
        if self.found is None:
            self._extend(self._pieces.flush())
        return self._show(0)

    def _extend(self, piece: str) -> None:
        before, text = len(self._end), self._end + piece
        self._fresh.append(piece)
        self._end = text[max(len(text) - self._reach, 0) :]
        if self.tokens <= self._min_tokens:
            return
        places = ((text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self._stop)
        at, stop = min((place for place in places if place[0] >= 0), key=lambda place: place[0], default=(-1, None))
        if stop is not None:
            # What is shown ends before the string, or before the piece, so what is cut off is fresh.
            fresh, over = "".join(self._fresh), len(text) - at - (len(stop) if self._include else 0)
            self.found, self._fresh = stop, [fresh[: len(fresh) - over]]

    def _show(self, held: int) -> str:
        fresh = "".join(self._fresh)
        end = max(len(fresh) - held, 0)
        self._shown.append(fresh[:end])
        self._fresh = [fresh[end:]]
        return fresh[:end]


def _byte_ids(backend) -> frozenset[int]:
    """Ids of the byte tokens <0x00>..<0xFF>, where the tokenizer's decoder reads them as bytes."""
    letter = backend.token_to_id("<0x41>")
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _check_characters(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"{text[error.start]!r} at position {error.start}"
            raise ValueError(f"the text has {found}: half of a surrogate pair, no character") from None


def _check_content(i: int, message: Mapping[str, Any]) -> None:
    """Raises ValueError for message i if its content is nothing that a template can read."""
    content = message.get("content")
    if content is None and not any(message.get(key) for key in CALLS):
        raise ValueError(f"message {i} has no content; found {', '.join(message)}, expected 'role' and 'content'")
    if not isinstance(content, str | list | tuple | None):
        raise ValueError(f"the content of message {i} is {content!r}, expected a str or a list of parts")
    for part in ({"type": "text", "text": content},) if isinstance(content, str) else content or ():
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(f"message {i} holds content of type {kind!r}; only text can be read")
        if isinstance(part.get("text"), str):
            _check_characters(part["text"])


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no files"


def _auto_tokenizer():
    """transformers.AutoTokenizer. Imported late, since that takes seconds, and without its advice to install PyTorch."""
    logger = logging.getLogger("transformers")

    def no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(no_advice)
    try:
        from transformers import AutoTokenizer
    finally:
        logger.removeFilter(no_advice)
    return AutoTokenizer
