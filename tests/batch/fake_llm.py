"""A stand-in for an LLM, and files of JSON lines."""

import json
import random
from types import MappingProxyType, SimpleNamespace

from jaxspec.engine.stats import RoundStats


class FakeLLM:
    """Answers with the prompt's ids, its temperature and its seed, a few requests at a time, in any order. dies: after how many.
    raises: what the prompts in `poison` raise once they are under way, None there for any prompt."""

    name, progress, max_len, target, learning = "fake", False, 32, (), None
    text_settings = MappingProxyType({"model": "fake", "max_len": 32, "dtype": "float32"})
    media = ()
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) % 100 for c in text])

    def __init__(self, dies=None, fails=(), raises=None, poison=None):
        self.raises, self.poison = raises, poison
        self.dies, self.fails, self.served, self.most_ahead = dies, fails, [], 0

    def check(self, prompt, params):
        if not len(prompt):
            raise ValueError("prompt 0 is empty; expected at least one token")

    def chat_input(self, messages, *, enable_thinking=False, tools=()):
        return [len(messages), int(enable_thinking), *(len(tool["function"]["name"]) for tool in tools)]

    def as_completed(self, prompts, params=None):
        waiting, source, given, shuffle = [], iter(prompts), 0, random.Random(0)
        while True:
            while len(waiting) < 4 and (item := next(source, None)) is not None:
                waiting.append((given, *item))
                given += 1
            if not waiting:
                return
            self.most_ahead = max(self.most_ahead, given - len(self.served))
            if len(self.served) == self.dies:
                raise KeyboardInterrupt
            index, prompt, params = waiting.pop(shuffle.randrange(len(waiting)))
            if self.raises is not None and (self.poison is None or prompt in self.poison):
                raise self.raises
            self.served.append(prompt)
            error = "row 3 is NaN" if params.seed in self.fails else None
            text = f"{prompt} {params.temperature} {params.seed}"
            yield SimpleNamespace(
                text=text,
                message={"role": "assistant", "content": text},
                token_ids=[7, 8, 9],
                prompt_token_ids=prompt,
                prompt_index=index,
                index=0,
                finish_reason="error" if error else "length",
                stop_reason=None,
                seed=params.seed,
                stats=RoundStats.of([False, True, False], 2, 2),
                logprobs=None,
                prompt_logprobs=None,
                error=error,
            )


def write_lines(path, lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sorted_lines(*paths):
    return sorted(line for path in paths for line in path.read_text().splitlines())
