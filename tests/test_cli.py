"""The command line, run in this process unless the process itself is what is tested."""

import io
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import huggingface_hub
import ignored
import jax
import pytest

import jaxspec
from jaxspec import cli
from jaxspec.engine.completion import Chunk
from jaxspec.engine.params import SamplingParams

pytestmark = pytest.mark.usefixtures("unoptimised", "shared_programs")


@pytest.fixture(scope="module")
def models(folders):
    return ["--target", str(folders[0]), "--drafter", str(folders[1]), "--max-len", "96", "--k", "2"]


@pytest.fixture(scope="module")
def llm(models):
    """As the command loads it, so that programs are the same."""
    return jaxspec.load(models[1], models[3], max_len=96, num_draft_tokens=2, max_slots=1, progress=False)


def test_generate_prints_the_prompt_its_continuation_and_the_statistics(models, llm, capsys):
    options = ["--prompt", "def f():", "--max-tokens", "9", "--temperature", "0.5", "--seed", "4", "--ignore-eos", "--stats"]
    assert cli.main(["generate", *models, *options]) == 0
    text, _, stats = capsys.readouterr().out.partition("\n\ntokens ")
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=4, ignore_eos=True)
    assert text == "def f():" + llm.generate("def f():", params)[0].text
    assert stats.startswith("            9 of 1 requests") and "tokens/s" in stats
    assert "acceptance length" in stats and "by position" in stats


def test_what_shapes_the_text_has_an_option(models, llm, capsys):
    given = {"max_tokens": 12, "temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 3}
    params = SamplingParams(**given, ignore_eos=True)
    whole = llm.generate("x", params)[0].text
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    stops = ["--stop", "never seen", "--stop", whole[4:6]]
    assert cli.main(["generate", *models, "--prompt", "x", *options, "--ignore-eos", *stops]) == 0
    assert capsys.readouterr().out == "x" + whole[: whole.index(whole[4:6])] + "\n"
    assert cli.main(["generate", *models, "--prompt", "x", *options, "--accept", "fly"]) == 2
    assert capsys.readouterr().err == "jaxspec: accept is 'fly'; available: 'coupled', 'standard', 'block', or accept.synthetic(rates)\n"


def test_generate_reads_a_prompt_from_standard_input(models, llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import os"))
    assert cli.main(["generate", *models, "--prompt", "-", "--max-tokens", "4", "--temperature", "0"]) == 0
    wanted = llm.generate("import os", SamplingParams(max_tokens=4, temperature=0))[0].text
    assert capsys.readouterr().out == f"import os{wanted}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffimport os"))  # as some editors begin a file
    assert cli.main(["generate", *models, "--prompt", "-", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"import os{wanted}\n"


def test_chat_answers_line_by_line_and_remembers(models, llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nBye\n"))
    assert cli.main(["chat", *models, "--system", "Short.", "--max-tokens", "5", "--temperature", "0"]) == 0
    params = SamplingParams(max_tokens=5, temperature=0)
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"}]
    first = llm.chat(messages, params).text
    second = llm.chat([*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "Bye"}], params).text
    assert capsys.readouterr().out == f"{first}\n{second}\n"


class Talker:
    """Thinks, answers "é", and is interrupted at the second turn. asked: what it was asked."""

    stats = "none"

    def __init__(self):
        self.asked = []

    def stream_chat(self, messages, params, *, enable_thinking):
        if len(messages[-1]["content"]) > 9:
            raise ValueError("prompt 0 has 99 tokens; expected at most 9")
        self.asked.append(messages)
        return self.chunks(len(self.asked) == 2)

    def chunks(self, interrupted):
        yield Chunk("hm ", [100], delta={"reasoning_content": "hm "})
        if interrupted:
            raise KeyboardInterrupt
        answer = SimpleNamespace(message={"role": "assistant", "content": "é", "reasoning_content": "hm"})
        yield Chunk("é", [7], "stop", answer, delta={"content": "é"})


def talk(monkeypatch, lines, *, somebody):
    talker, waiting = Talker(), iter(lines)

    def read(prompt):
        line = next(waiting, None)
        if line is None:
            raise EOFError
        if isinstance(line, OSError):
            raise line
        return line if isinstance(line, str) else line.decode()

    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (talker, SamplingParams()))
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: somebody)
    return cli.main(["chat"]), talker.asked


def test_a_conversation_outlives_an_interrupted_answer_and_a_turn_too_long(monkeypatch, capsys):
    status, asked = talk(monkeypatch, ["a", "b", "much too long", "c"], somebody=True)
    assert (status, capsys.readouterr().err) == (0, "jaxspec: prompt 0 has 99 tokens; expected at most 9\n")
    assert [message["content"] for message in asked[-1]] == ["a", "é", "b", "", "c"]
    assert [message.get("reasoning_content") for message in asked[-1]] == [None, "hm", None, None, None]
    for lines, wanted in ((["a", "b", "c"], 130), (["a", "much too long"], 2)):  # where nobody types, each ends the command
        assert talk(monkeypatch, lines, somebody=False)[0] == wanted


def test_a_line_that_is_no_text_does_not_end_a_conversation(monkeypatch, capsys):
    """Of which standard input says so itself in most locales."""
    status, asked = talk(monkeypatch, ["\ufeffa", b"caf\xe9", "c"], somebody=True)
    assert status == 0 and "jaxspec: 'utf-8' codec can't decode byte 0xe9" in capsys.readouterr().err
    assert [message["content"] for message in asked[-1]] == ["a", "é", "c"]
    assert talk(monkeypatch, ["a", b"caf\xe9", "c"], somebody=False)[0] == 2
    with pytest.raises(OSError, match="no terminal"):  # which every further line would be
        talk(monkeypatch, ["a", OSError("no terminal"), "c"], somebody=True)


def test_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", screen)
    assert talk(monkeypatch, ["a"], somebody=False)[0] == 0
    screen.flush()
    assert screen.buffer.getvalue() == b"hm \n?\n"


def test_a_terminal_shows_thoughts_dimmed(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert talk(monkeypatch, ["a"], somebody=True)[0] == 0
    assert capsys.readouterr().out == "\x1b[2mhm \x1b[0m\né\n"


def test_bench_refuses_a_bad_list_and_a_file_that_cannot_be_written_before_it_measures(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("jaxspec.bench.timing.measure_plan", lambda *args, **settings: pytest.fail("it measured"))
    with pytest.raises(SystemExit):
        cli.main(["bench", "--config", "e2b", "--batch", "1,x"])
    assert "argument --batch: found '1,x', expected whole numbers with commas between them" in capsys.readouterr().err
    assert cli.main(["bench", "--config", "e2b", "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["bench", "--config", "e2b", "--profile", str(tmp_path / "file" / "folder")]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "x"], ["chat"], ["batch", "in.jsonl", "out.jsonl"], ["convert", "pocket", "out"]]
)
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tensor=0", "the mesh is 'tensor=0'; expected 'data=N', 'tensor=N' or both with a comma between them"),
        ("tensor=99", "a mesh of data=1 times tensor=99 devices was asked for; found 8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_by_every_command(command, mesh, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "--mesh", mesh]) == 2
    assert capsys.readouterr().err == f"jaxspec: {message}\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat"]])
def test_generate_and_chat_hand_the_mesh_on(command, monkeypatch, capsys):
    def load(*names, mesh, **settings):
        raise ValueError(f"{names[0]} over {dict(mesh.shape)}")

    monkeypatch.setattr("jaxspec.loading.load", load)
    assert cli.main([*command, "--mesh", "data=2,tensor=4"]) == 2
    assert capsys.readouterr().err == "jaxspec: pocket over {'data': 2, 'tensor': 4}\n"


def test_info_says_what_a_checkpoint_is_and_needs(models, capsys):
    assert cli.main(["info", models[1], "--drafter", models[3]]) == 0
    lines = dict((line[:11].strip(), line[11:].strip()) for line in capsys.readouterr().out.splitlines() if line[:11].strip())
    assert lines["layers"] == "1 sliding (window 8), 1 full"
    assert lines["full"] == "2 heads, 1 KV heads of 16, K = V"
    # By hand: embeddings 131,072 and 32,768, layers 6,577 and 7,617, the rest 292; K and V of 8 elements of 2 bytes, and where K = V
    # 4 rotary elements of K and 16 of V.
    assert lines["parameters"] == "178,326, of which 32,768 are per-layer embeddings"
    assert "plan" not in lines
    assert cli.main(["info", models[1], "--max-slots", "2"]) == 0
    assert "plan        2 slots, " in capsys.readouterr().out
    for target in (models[1], "e2b"):
        assert cli.main(["info", target, "--drafter", "ngram", "--plan"]) == 0
        shown = capsys.readouterr().out
        assert "drafter     ngram, without weights; fits every target\n" in shown and "target, 0.00 MiB drafter" in shown
    assert "vision      168,544,704 parameters, 321.47 MiB; with images=True, up to 280 tokens an image" in shown
    assert "vision" not in lines
    assert cli.main(["info", "31B"]) == 2
    assert capsys.readouterr().err == "jaxspec: '31B' is no folder; for the released shape expected '31b'\n"
    assert lines["KV cache"] == "sliding 32 bytes a token, for the window; full 40 bytes a token"


def test_info_downloads_no_weights(models, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **settings: asked.append((name, settings)) or models[1])
    assert cli.main(["info", "google/gemma-4-31B-it"]) == 0
    [(name, settings)] = asked
    files = ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"]
    assert (name, list(huggingface_hub.utils.filter_repo_objects(files, **settings))) == ("google/gemma-4-31B-it", files[::2])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **settings: (_ for _ in ()).throw(OSError("gone")))
    assert cli.main(["info", "nobody/nothing"]) == 2
    assert capsys.readouterr().err == "jaxspec: 'nobody/nothing' is not a folder, and the hub did not provide a model of that id: gone\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["generate", "--target", "/nowhere", "--prompt", "x"], "jaxspec: '/nowhere' is neither a folder"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "jaxspec: temperature is -1.0, expected a finite number"),
        (["generate", "--prompt", "x", "--top-k", "99999999999"], "jaxspec: top_k is 99999999999, expected -1 .. 2147483647"),
        (["generate", "--prompt", ""], "jaxspec: prompt 0 is empty; expected at least one token"),
        (["generate", "--prompt", "a", "--prompt", "b"], "jaxspec: --prompt is given 2 times, expected once; jaxspec batch completes"),
        (["chat", "--k", "-3"], "jaxspec: num_draft_tokens is -3, expected 0 .. 95"),
        (["info", "/nowhere"], "jaxspec: '/nowhere' is neither a folder"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_status_2(models, capsys, options, message):
    given = [*options[:1], *models, *options[1:]] if options[0] != "info" else options
    assert cli.main(given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.err.count("\n") == 1
    assert captured.out == ""


def test_closed_streams_are_empty_ones(models, capsys, monkeypatch):
    """As services start what they run."""
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate", *models, "--prompt", "-"]) == 2
    sys.stdin.close()
    assert capsys.readouterr().err == "jaxspec: prompt 0 is empty; expected at least one token\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["info", models[1]]) == 0
    sys.stdout.close()


def test_unknown_options_are_status_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate"])
    assert stopped.value.code == 2
    assert "the following arguments are required: --prompt" in capsys.readouterr().err


def test_an_interrupt_where_python_ignores_it_is_heeded(monkeypatch, capsys):
    def load(args, **settings):
        ignored.interrupt()
        time.sleep(60)

    before = sys.unraisablehook
    monkeypatch.setattr("jaxspec.cli.options.load_model", load)
    assert cli.main(["generate", "--prompt", "x"]) == 130
    assert capsys.readouterr().err == "\n" and sys.unraisablehook is before


def test_an_interrupt_is_status_130_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["generate", "--prompt", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_device_without_memory_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (_ for _ in ()).throw(MemoryError("lower max_slots")))
    assert cli.main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "jaxspec: lower max_slots\n"

    def full(*args, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nmore")

    monkeypatch.setattr("jaxspec.train.distil", full)
    assert cli.main(["train", "--target", "pocket", "--drafter-kind", "mtp", "--data", "x", "--out", "y"]) == 2
    told = "jaxspec: the device ran out of memory; lower --batch or --length, or take --accumulate: RESOURCE_EXHAUSTED: Out of memory"
    assert capsys.readouterr().err == f"{told} allocating 7 bytes.\n"


def test_training_that_is_interrupted_says_how_it_goes_on(monkeypatch, tmp_path, capsys):
    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxspec.train.distil", interrupted)
    command = ["train", "--target", "pocket", "--drafter-kind", "mtp", "--data", "x", "--out", str(tmp_path)]
    assert cli.main(command) == 130 and capsys.readouterr().err == "\n"
    kept = tmp_path / "checkpoints"
    (kept / "200").mkdir(parents=True)
    assert cli.main(command) == 130
    assert capsys.readouterr().err == f"\njaxspec: interrupted; the same command with --resume goes on from the newest of {kept}\n"


def test_a_process_starts_without_jax_and_ends_quietly_when_nobody_reads(models):
    code = "import sys, jaxspec.cli; jaxspec.cli._parser(); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    command = f"{sys.executable} -m jaxspec info {models[1]} | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.returncode in (0, 1) and "Traceback" not in run.stderr and "Exception" not in run.stderr


def test_a_process_says_nothing_but_the_text(models):
    command = [sys.executable, "-m", "jaxspec", "generate", *models, "--prompt", "x", "--max-tokens", "2", "--seed", "1"]
    kept = {  # so that programs are those that the tests above have compiled
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | kept)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("x") and run.stdout.endswith("\n")


def test_an_output_that_takes_no_more():
    """A reader that has had enough ends a command quietly, a full disk with a line that says so."""
    command = [sys.executable, "-m", "jaxspec", "info", "pocket"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "jaxspec: nothing more can be written: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
