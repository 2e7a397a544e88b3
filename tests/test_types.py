"""What a type checker sees of the package in a user's script."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jaxspec
import pallas_kernels

SCRIPT = """
import jaxspec
from jaxspec import vllm

llm = jaxspec.load("pocket", drafter="pocket-mtp", max_len=64)
reveal_type(llm)
params = jaxspec.SamplingParams(max_tokens=3).replace(seed=1)
jaxspec.SamplingParams(stop=["x"], stop_token_ids=[1], allowed_token_ids=[1, 2], bad_words=["x"])
jaxspec.StructuredOutputsParams(choice=["x", "y"])
reveal_type(llm.generate(["x"], params)[0].text)
for chunk in llm.stream("x"):
    reveal_type(chunk)
reveal_type(vllm.LLM("pocket").generate("x")[0].outputs[0].token_ids)
llm.chat([{"role": "user", "content": "Hi"}], tools=[], add_generation_prompt=True)
llm.generate(["x"], sampling_params=params, use_tqdm=False)
jaxspec.load("pocket", max_model_len=64)
jaxspec.SamplingParams(max_token=3)
llm.generate(["x"], parms=params)
llm.chat([], continue_final_mesage=True)
vllm.SamplingParams(max_token=3)
jaxspec.lode("pocket")
"""
README = Path(__file__).parent.parent / "README.md"
REVEALED = ["LLM", "str", "Chunk", "list[int]"]
WRONG = ["max_model_len", "max_token", "parms", "continue_final_mesage", "max_token", "lode"]


def test_pyright_sees_types_and_wrong_names(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)):
        (tmp_path / f"readme_{number}.py").write_text(block)  # which have nothing wrong
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(Path(jaxspec.__file__).parents[1])]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [one for one in found if one["severity"] == "error"]
    first = next(number for number, line in enumerate(SCRIPT.splitlines()) if "max_model_len" in line)
    assert [one["range"]["start"]["line"] for one in errors] == list(range(first, first + len(WRONG))), errors
    assert all(f'"{name}"' in one["message"] for name, one in zip(WRONG, errors, strict=True)), errors
    told = [one["message"] for one in found if one["severity"] == "information"]
    assert [message.split(" is ")[1].strip('"') for message in told] == REVEALED


def test_the_lazy_names_are_those_that_checkers_see():
    assert set(jaxspec.__all__) == set(jaxspec._EXPORTS) | set(jaxspec._MODULES)
    assert all(Path(package.__file__).with_name("py.typed").exists() for package in (jaxspec, pallas_kernels))
