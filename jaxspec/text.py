"""Text in and out: the checkpoint's tokenizer and chat template, and detokenizing a sequence while it grows."""

import inspect
import json
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jaxspec.checks import characters, type_name, unknown

# How many old tokens we decode again with new ones. A decoder may treat the first token of its input differently (strip its leading
# space, say), and a character has at most 4 bytes. Over 8 tokens neither reaches the new ones.
CONTEXT_TOKENS = 8
# What content may have beside text: what it is called, and what to do where it is not read.
MEDIA = {
    "image": ("images", "; to read images, load with images=True"),
    "audio": ("sounds", "; to hear sounds, load with audio=True"),
    "video": ("videos", "; to see videos, load with videos=True"),
}
TOOL_KEYS = ("tool_calls", "tool_responses")  # a message may have one of these instead of content
# Arguments of transformers' apply_chat_template for the template itself.
TEMPLATE_NAMES = ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
# Classes of tokenizers that tokenizer_config.json may name, and what transformers calls them.
CLASSES = {
    "GemmaTokenizer": "GemmaTokenizer",
    "GemmaTokenizerFast": "GemmaTokenizer",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",
}
THOUGHTS = ("<|channel>", "<channel|>")  # the tokens around thoughts
THINK = "<|think|>"  # the token of a prompt that asks for them
OTHER_THOUGHTS = ("<think>", "</think>")  # Step-3.5's, which are text; a prompt ends with the first where its template opens a thought
INCOMPLETE = "\ufffd"  # decoders write it for bytes that are no character, or not yet


class TemplateOptions(TypedDict, total=False):
    """How a conversation is written, beside its messages."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None  # functions that the model may call, or schemas of these
    chat_template: str | None  # a template in place of the checkpoint's
    chat_template_kwargs: Mapping[str, Any] | None  # more names that the template knows
    add_generation_prompt: bool  # whether it ends with the opening of the model's turn; True by default
    continue_final_message: bool  # whether it ends within the last message, for the model to go on; not together with the former


class Tokenizer:
    """A checkpoint's tokenizer, as transformers loads it from the checkpoint's folder."""

    def __init__(self, hf_tokenizer, folder: Path):
        self._hf = hf_tokenizer
        self._folder = folder
        backend = hf_tokenizer.backend_tokenizer
        # None where the tokenizer has no such token. A model may stop at further ids, which are in its config.
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self.pad_token_id: int | None = hf_tokenizer.pad_token_id
        # Ids with a token, added tokens included. A model's embedding may have more rows.
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.byte_ids = _byte_ids(backend)  # ids of byte tokens

    def encode(self, text: str) -> list[int]:
        """The token ids of text, with the special tokens that the checkpoint's tokenizer adds.

        A text that begins with bos, as a chat template's does, gets no second one. Raises TypeError for anything but a str,
        ValueError for half of a surrogate pair, which is no character.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode() takes one str, found {type(text).__name__}")
        characters("the text", text)
        ids = self._hf.encode(text)
        return ids[1:] if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2 else ids

    @property
    def transformers(self) -> Any:
        """The tokenizer as transformers has it."""
        return self._hf

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids. It leaves out ids without a token and, unless they are asked for, special tokens. Bytes that are no UTF-8
        character become U+FFFD."""
        # Not through transformers: its clean-up may change text far back, so text could not be streamed.
        return self._hf.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)

    @property
    def thought_ids(self) -> tuple[int, int, int]:
        """The tokens that open and close a thought, and the one that asks for it in a prompt; -1 for one that there is not."""

        def ids(tokens: tuple[str, ...]) -> list[int]:
            found = (self._hf.backend_tokenizer.token_to_id(token) for token in tokens)
            return [-1 if i is None else i for i in found]

        marks = next((both for both in map(ids, (THOUGHTS, OTHER_THOUGHTS)) if min(both) >= 0), (-1, -1))
        return marks[0], marks[1], ids((THINK,))[0]

    def has_tokens(self, texts: Collection[str]) -> bool:
        """Whether each of these texts is one token."""
        return all(self._hf.backend_tokenizer.token_to_id(text) is not None for text in texts)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, even a special one; "" for an id without a token."""
        return self.decode([token_id], special=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of `token_text`; of a token that is a part of a character, those that it adds to the text."""
        token = self._hf.backend_tokenizer.id_to_token(token_id)
        return b"" if token is None else bytes_of(token, self.token_text(token_id), token_id in self.byte_ids)

    def encode_word(self, text: str) -> list[int]:
        """The token ids of text, without special tokens around it. Raises ValueError as `encode` does."""
        characters("the text", text)
        return self._hf.encode(text, add_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """False for what `decode` leaves out: special tokens, and ids without a token, which a padded vocabulary has."""
        return token_id not in self._special_ids and self._hf.backend_tokenizer.id_to_token(token_id) is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *, media: Collection[str] = (), **kwargs
    ) -> list[int]:
        """The token ids of a conversation, by the checkpoint's chat template.

        messages: mappings with "role" and "content", oldest first. add_generation_prompt: end with the opening of the model's turn. media:
        "image" and "audio" if content may have parts {"type": "image"} and {"type": "audio"}, for each of which the template writes a
        token. kwargs go to the template (tools=..., enable_thinking=...). Raises ValueError if there is no template or no message, if a
        message has no role, or neither text nor tool calls nor their responses, and if the template refuses the conversation.
        """
        if self._hf.chat_template is None and kwargs.get("chat_template") is None:
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
            _check_content(i, message, media)
        conversation = [_with_arguments(message) for message in messages]
        options = {"add_generation_prompt": add_generation_prompt, **kwargs}
        if not self._reads_parts(conversation, options):
            conversation = [in_one_text(message) for message in conversation]
        try:
            return self._hf.apply_chat_template(conversation, return_dict=False, **options)
        except Exception as error:  # a template is the checkpoint's code: it may raise anything, most often TemplateError
            raise ValueError(f"the chat template of {self._folder} refused the conversation: {error}") from error

    def _reads_parts(self, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> bool:
        """Whether the chat template goes through content in parts. One that takes all content for text writes the list as Python shows it,
        or fails."""
        lists = [list(m["content"]) for m in conversation if isinstance(m.get("content"), list | tuple) and m["content"]]
        if not lists:
            return True
        try:
            text = self._hf.apply_chat_template(conversation, **{**options, "tokenize": False})
        except Exception:  # it may raise anything
            return False
        return not any(str(parts) in text for parts in lists)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions, enable_thinking: bool, media: Collection[str] = ()
    ) -> list[int]:
        """`apply_chat_template` with options by their names. media: as there. Raises TypeError for an option that there is not and for
        tools that are no list, ValueError for chat_template_kwargs that change more than what the template writes."""
        for name in options:
            if name not in TemplateOptions.__annotations__:
                raise unknown("chat", name, ("params", "enable_thinking", *TemplateOptions.__annotations__))
        if not isinstance(options.get("tools"), list | tuple | None):  # an iterator would be at its end after one conversation
            raise TypeError(f"tools is of type {type_name(options.get('tools'))}, expected a list of functions or of dicts")
        known: dict[str, Any] = dict(options)
        more = known.pop("chat_template_kwargs", None)
        if more is not None:
            self._check_names(more)
        return self.apply_chat_template(messages, media=media, **{"enable_thinking": enable_thinking, **(more or {}), **known})

    def _check_names(self, more: Any) -> None:
        """Raises TypeError or ValueError for what does not go to the chat template alone."""
        if not isinstance(more, Mapping) or any(not isinstance(name, str) for name in more):
            raise TypeError(f"chat_template_kwargs is {more!r}, expected a dict of names that the chat template knows")
        # transformers takes these names for its own arguments, which cut or pad the tokens, or give something else than tokens.
        own = {*inspect.signature(self._hf.apply_chat_template).parameters, "self", "messages"} - {*TEMPLATE_NAMES, "kwargs"}
        if refused := sorted(own.intersection(more)):
            raise ValueError(f"chat_template_kwargs has {refused[0]!r}, which is no name for the chat template")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint in a local folder: tokenizer.json, with tokenizer_config.json and chat_template.jinja if they exist.

    It downloads nothing and runs no code from the folder. It warns of a chat template that writes a bos_token which there is not. Raises
    FileNotFoundError if there is no tokenizer.json, ValueError if that cannot be loaded, and as `check_files`.
    """
    folder = Path(folder)
    tokenizer_class = _tokenizer_class(check_files(folder))
    try:
        hf_tokenizer = tokenizer_class.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the parser raises many types, even bare Exception
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from error
    template = hf_tokenizer.chat_template
    if isinstance(template, str) and "bos_token" in template and hf_tokenizer.bos_token is None:
        warnings.warn(
            f"the chat template of {folder} writes bos_token, which no tokenizer_config.json there names: chats go without it",
            UserWarning,
            stacklevel=2,
        )
    return Tokenizer(hf_tokenizer, folder)


def check_files(folder: Path) -> dict[str, Any]:
    """What a checkpoint's tokenizer_config.json says; nothing if there is none. Raises FileNotFoundError if there is no tokenizer.json, and
    ValueError if tokenizer_config.json is no JSON object, or names a tokenizer file elsewhere, which transformers would read."""
    if not (folder / "tokenizer.json").is_file():
        found = f"it has {_listing(folder)}" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{folder} has no tokenizer.json: {found}. Every release has that file: copy it from there")
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected an object")
    names = config.get("fast_tokenizer_files") or ()
    outside = [name for name in names if Path(str(name)).name != name]
    if outside:
        raise ValueError(f"{path} names {outside[0]!r}, which is outside its folder")
    return config


class IncrementalDetokenizer:
    """Detokenizes one sequence while it grows. The pieces that it returns join to `tokenizer.decode` of all ids.

    A piece never ends inside a character: bytes that are no complete character yet are held back. So is a run of byte tokens (<0xE2>...)
    until another token ends it, since only then it is known whether the run is text. The cost of a push does not depend on how long the
    sequence is.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last ids before _run: those whose text is not all returned, and a few before
        self._run: list[int] = []  # byte tokens at the end, all held back
        self._shown = 0  # characters of the window's text that have been returned

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids, any number of them. Returns the text that is now certain and was not returned before, "" if none."""
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
        held = text.endswith(INCOMPLETE)  # if there are several, only the last can still become a character
        piece = text[self._shown : len(text) - held]
        if len(self._window) > CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            text = self._tokenizer.decode(self._window)
        self._shown = len(text) - held
        return piece

    @property
    def held(self) -> str:
        """The characters that are held back. Bytes that are none yet are left out."""
        return self._tokenizer.decode(self._window + self._run)[self._shown :].rstrip(INCOMPLETE) if self._run else ""

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the sequence. Afterwards the object is ready for another sequence."""
        piece = self._tokenizer.decode(self._window + self._run)[self._shown :]
        self._window, self._run, self._shown = [], [], 0
        return piece


class OutputText:
    """The text of one sequence while it grows, up to the first stop string.

    What `push` returns stays: it is never taken back. The cost of a push does not depend on how long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0):
        """stop: strings that end the text; they may cross tokens. One that is complete within the first `min_tokens` tokens does not
        count. include_stop: whether the text ends after the stop string or before it."""
        self._pieces = IncrementalDetokenizer(tokenizer)
        self._stop, self._include, self._min_tokens = tuple(stop), include_stop, min_tokens
        # How much of a stop string may stand before the piece that completes it. That must be held back if the string is not included.
        self._reach = max(map(len, stop), default=1) - 1
        self._held = 0 if include_stop else self._reach
        self._shown, self._fresh = list[str](), list[str]()  # pieces of the text: those that `push` returned, and the others
        self._end = ""  # the last `_reach` characters of the text
        self.tokens = 0  # ids taken; none is taken after the one that completes a stop string
        self.found = None  # the stop string that ended the text

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join([*self._shown, *self._fresh])

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids, up to a stop string. Returns the text that is now certain and was not returned before."""
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
        """Returns the rest of the text, at the end of the sequence."""
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
            # What was returned ends before the stop string, or before this piece, so only fresh text is cut off.
            fresh, over = "".join(self._fresh), len(text) - at - (len(stop) if self._include else 0)
            self.found, self._fresh = stop, [fresh[: len(fresh) - over]]

    def _show(self, held: int) -> str:
        fresh = "".join(self._fresh)
        end = max(len(fresh) - held, 0)
        self._shown.append(fresh[:end])
        self._fresh = [fresh[end:]]
        return fresh[:end]


def bytes_of(token: str, text: str, is_byte: bool) -> bytes:
    """The bytes that a token adds to a text. token: as the vocabulary writes it; text: as it is decoded; is_byte: whether it is one of
    `Tokenizer.byte_ids`."""
    if is_byte:  # <0xNN>
        return bytes([int(token[3:5], 16)])
    if INCOMPLETE in text and all(c in ALPHABET for c in token):  # a part of a character, in a vocabulary of bytes
        return bytes(ALPHABET[c] for c in token)
    return text.encode()


def _alphabet() -> dict[str, int]:
    """How vocabularies of bytes, since GPT-2, write each byte: printable ones of Latin-1 as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET = _alphabet()


def _byte_ids(backend) -> frozenset[int]:
    """The ids of the byte tokens <0x00> .. <0xFF>, if the tokenizer's decoder reads them as bytes."""
    letter = backend.token_to_id("<0x41>")
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _check_content(i: int, message: Mapping[str, Any], media: Collection[str]) -> None:
    """Raises ValueError for message i if it has content that a template cannot read. media: what it may have beside text."""
    content = message.get("content")
    if content is None and not any(message.get(key) for key in TOOL_KEYS):
        raise ValueError(f"message {i} has no content; found {', '.join(message)}, expected 'role' and 'content'")
    if not isinstance(content, str | list | tuple | None):
        raise ValueError(f"the content of message {i} is {content!r}, expected a str or a list of parts")
    for part in ({"type": "text", "text": content},) if isinstance(content, str) else content or ():
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in media:
            continue
        if kind != "text":
            read = " and ".join(["texts", *(MEDIA[known][0] for known in media)]) if media else "only text"
            more = next((hint for name, (_, hint) in MEDIA.items() if name not in media and name in str(kind)), "")
            raise ValueError(f"message {i} holds content of type {kind!r}; {read} can be read{more}")
        if isinstance(part.get("text"), str):
            characters("the text", part["text"])


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message in which the arguments of its calls are a dict, as chat templates read them. In OpenAI's form they are a JSON
    text, which templates would write as it is. A text that is no JSON object stays."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_with_dict(call) for call in calls]}


def _with_dict(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        found = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call


def in_one_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is a text: of parts, theirs, a line for each, as vLLM has it. One with other parts stays."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
        return message
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no files"


_IMPORTING = threading.Lock()  # transformers imports its classes as they are asked for: a second thread would not find them


def _tokenizer_class(config: Mapping[str, Any]) -> Any:
    """transformers' class for a tokenizer. config: its tokenizer_config.json. The import is here because it takes seconds. We filter out
    its advice to install PyTorch.

    AutoTokenizer imports PyTorch where it is installed, which takes seconds more. The classes that checkpoints of Gemma name are taken by
    their names: AutoTokenizer comes to the same."""
    name = None if "auto_map" in config else CLASSES.get(str(config.get("tokenizer_class")))
    logger = logging.getLogger("transformers")

    def no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(no_advice)
    try:
        with _IMPORTING:
            import transformers

            return getattr(transformers, name or "AutoTokenizer")
    finally:
        logger.removeFilter(no_advice)
