"""The real command line: quick without torch, one line for each mistake, and a whole experiment end to end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sagebwd.training import yaml_text

pytest_plugins = ("tests.small_corpus",)
ROOT = Path(__file__).parents[1]
SMALL = "recipes/small.yaml"


def sagebwd(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sagebwd.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_output_that_nobody_reads_any_more_is_no_failure_to_explain():
    """As in `sagebwd recipe ... --print-config | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sagebwd.cli", "recipe", str(SMALL), "--print-config"]
    answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert answer.returncode == 141
    assert answer.stderr == ""


def one_line_error(answer: subprocess.CompletedProcess[str]) -> str:
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert re.fullmatch(r"error: [^\n]+\n", answer.stderr), answer.stderr
    return answer.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("recipe recipes/smal.yaml", "no recipe file recipes/smal.yaml: did you mean 'recipes/small.yaml'?"),
        ("recipe nowhere/small.yaml", "no recipe file nowhere/small.yaml"),
        ("recipe recipes/base.yaml", "recipes/base.yaml has no arms"),
        (
            f"recipe {SMALL} model.layer=2",
            "unknown key 'model.layer' in the command line: did you mean 'model.layers'?",
        ),
        (f"prepare {SMALL} data.vocab=2", "did you mean 'data.vocab_size'?"),
        (f"recipe {SMALL} train.tokens_per_step=5000 train.micro_batch=4", "train.tokens_per_step is 5000"),
        (f"recipe {SMALL} train.tokens_per_step=5000 train.micro_batch=4", "set it to 4096 or 5120"),
        (f"recipe {SMALL} parallel.tensor=3 --nproc 3", "parallel.tensor is 3, but model.heads is 4"),
        (f"recipe {SMALL} parallel.tensor=2", "parallel.tensor is 2, but 1 rank(s)"),
        (f"recipe {SMALL} optimizer.lr=fast --arms fpa", "optimizer.lr is 'fast'"),
        (f"recipe {SMALL} --arms fp", "has no arm 'fp': did you mean 'fpa'?"),
        (f"recipe {SMALL} --arms ,", "--arms: name at least one arm"),
        (f"recipe {SMALL} --nproc 0", "--nproc: '0' must be a whole number of at least 1"),
        (f"recipe {SMALL} --nprocs 2", "unknown argument '--nprocs'"),
        (f"train {SMALL} --arm sage", "has no arm 'sage'"),
        (f"train {SMALL}", "one of the arguments --arm --arm-index is required"),
        (f"train {SMALL} --arm-index 3", "--arm-index is 3, but recipes/small.yaml has 3 arms: count from 0"),
        (f"recipe {SMALL} --at-once 0", "--at-once: '0' must be a whole number of at least 1"),
        ("compare runs/nowhere", "no folder runs/nowhere"),
        ("status runs/nowhere", "no status.json in runs/nowhere"),
        ("compare recipes more", "unknown argument 'more'"),
        ("probe runs/nowhere", "runs/nowhere holds no checkpoint"),
        ("probe runs/small/fpa --sequences 0", "--sequences: '0' must be a whole number"),
        ("corpus debian", "invalid choice: 'debian'"),
        (f"prepare {SMALL} data.corpus=debian-prose --data nowhere", "build it with `sagebwd corpus debian-prose"),
        ("recip", "invalid choice: 'recip'"),
        ("", "required"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, complaint: str) -> None:
    assert complaint in one_line_error(sagebwd(*arguments.split()))


def test_print_config_prints_every_arm_resolved_and_starts_nothing(tmp_path: Path) -> None:
    recipe = ROOT / SMALL
    answer = sagebwd("recipe", recipe, "model.layers=2", "--print-config", "optimizer.lr=5e-3", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    documents = answer.stdout.split("---\n")
    assert [text.split()[2] for text in documents] == ["fpa:", "sagebwd:", "sagebwd-paper:"]
    for text in documents:
        tree = yaml_text.parse(text)
        assert (tree["model"]["layers"], tree["optimizer"]["lr"]) == (2, 0.005)
    assert yaml_text.parse(documents[2])["attention"]["quant"]["granularity"] == "tile"
    assert list(tmp_path.iterdir()) == []
    assert sagebwd("train", recipe, "--arm", "sagebwd", "--print-config").stdout.count("name: small") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "recipe --help",
        f"recipe {SMALL} --print-config",
        f"recipe {SMALL} --dry-run --gpu h200",
        "recipe nowhere.yaml",
    ],
)
def test_the_quick_commands_import_nothing_heavy(arguments: str) -> None:
    program = (
        "import sys; from sagebwd.cli import main\n"
        f"try: main({arguments.split()!r})\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'megatron', 'triton', 'tensorboard'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


# An experiment of seconds


@pytest.fixture(scope="module")
def tiny(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of two arms on a small corpus: 12 steps, a checkpoint every 4."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    path.write_text(
        f"""
model: {{layers: 1, hidden: 32, heads: 2, ffn: 64}}
data: {{corpus: files, files: ["{small_corpus}"], vocab_size: 512, context: 32, validation_fraction: 0.2}}
train: {{tokens_per_step: 256, total_tokens: 3072, micro_batch: 4}}
optimizer: {{lr: 1e-2, min_lr: 1e-3}}
evaluation: {{every_steps: 4, tokens: 512}}
checkpoint: {{every_steps: 4}}
arms: {{fpa: {{attention.kind: fpa}}, sagebwd: {{attention.kind: sagebwd}}}}
""",
        encoding="utf-8",
    )
    return path


def test_an_experiment_from_end_to_end(tiny: Path) -> None:
    here = tiny.parent
    first = sagebwd("recipe", tiny.name, cwd=here)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = first.stdout.splitlines()
    assert re.fullmatch(r"recipe tiny: fpa, sagebwd, on (CPU, PyTorch reference|.+, Triton kernels)", lines[0])
    assert sum(line.startswith(("fpa  ", "sagebwd  ")) for line in lines) == 2  # the table

    folder = here / "runs" / "tiny"
    assert {path.name for path in (folder / "report").iterdir()} == {
        "report.md", "curves.png", "summary.json", "tensorboard",
    }  # fmt: skip
    for arm in ("fpa", "sagebwd"):
        assert json.loads((folder / arm / "meta.json").read_text())["status"] == "done"
        assert "step 12/12" in (folder / arm / "log.txt").read_text()
    result = json.loads((folder / "report" / "summary.json").read_text())["arms"]["sagebwd"]["result"]
    assert result["steps"] == 12
    assert abs(result["gap"]) < 0.1
    assert sagebwd("status", "runs/tiny/fpa", cwd=here).returncode == 0
    assert "sagebwd recipe tiny.yaml" in (folder / "report" / "report.md").read_text()

    # A second call does nothing again, and another recipe may not take the folder.
    before = {path: path.stat().st_mtime_ns for arm in ("fpa", "sagebwd") for path in (folder / arm).rglob("*")}
    second = sagebwd("recipe", tiny.name, cwd=here)
    assert second.returncode == 0
    assert second.stdout.count("done already") == 2
    assert before == {path: path.stat().st_mtime_ns for path in before}
    complaint = one_line_error(sagebwd("recipe", tiny.name, "optimizer.lr=2e-2", cwd=here))
    assert "runs/tiny/fpa holds a run with optimizer.lr = 0.01, and this one has 0.02" in complaint
    assert "checkpoint.accept_changed=[optimizer.lr]" in complaint
    assert sagebwd("compare", "runs/tiny", cwd=here).returncode == 0

    # A checkpoint of another model is refused. (Put there by hand: the folder's config.yaml would be refused before.)
    shutil.copytree(folder / "fpa" / "checkpoints", here / "others" / "tiny" / "fpa" / "checkpoints")
    arguments = ["--arm", "fpa", "--runs", "others", "model.ffn=128"]
    complaint = one_line_error(sagebwd("train", tiny.name, *arguments, cwd=here))
    assert "model.ffn" in complaint


def test_data_that_cannot_be_used(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    empty = sagebwd("recipe", tiny, f"data.files=[{tmp_path / 'empty.txt'}]", cwd=tmp_path)
    assert "is empty" in one_line_error(empty)
    assert not (tmp_path / "runs").exists()

    assert sagebwd("prepare", tiny, cwd=tmp_path).returncode == 0
    assert sagebwd("prepare", tiny, "data.vocab_size=400", cwd=tmp_path).returncode == 0
    (prepared,), (smaller,) = tmp_path.glob("data/files-v512-*"), tmp_path.glob("data/files-v400-*")
    index = (prepared / "train.idx").read_bytes()
    (prepared / "train.idx").write_bytes(index[:-8])
    assert f"{prepared.relative_to(tmp_path) / 'train.idx'} is" in one_line_error(sagebwd("recipe", tiny, cwd=tmp_path))
    (prepared / "train.idx").write_bytes(index)
    shutil.copy(smaller / "tokenizer.model", prepared / "tokenizer.model")
    assert "tokenizer.model has 400 pieces" in one_line_error(sagebwd("recipe", tiny, cwd=tmp_path))


def test_a_killed_arm_is_named_the_other_goes_on_and_the_same_command_resumes(tiny: Path) -> None:
    here = tiny.parent
    command = [sys.executable, "-m", "sagebwd.cli", "recipe", tiny.name, "name=killed", "train.total_tokens=25600"]
    command += ["checkpoint.every_steps=10", "evaluation.every_steps=100"]
    log = here / "runs" / "killed" / "fpa" / "log.txt"
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for((log.parent / "checkpoints" / "latest").exists, process)  # written last
        os.kill(child_of(process.pid), signal.SIGKILL)
        output, errors = process.communicate()
    assert process.returncode == 1
    assert (
        "error: arm fpa failed: its process was killed by signal 9; its output is in runs/killed/fpa/log.txt" in errors
    )
    assert json.loads((here / "runs/killed/sagebwd/meta.json").read_text())["status"] == "done"
    assert "fpa (step" in output  # the comparison, with the arm as far as it came

    again = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "arm sagebwd: done already" in again.stdout
    assert "going on after step" in log.read_text()
    assert json.loads((log.parent / "meta.json").read_text())["status"] == "done"


def test_two_ranks_under_torchrun(tiny: Path) -> None:
    arguments = ["name=two", "--nproc", "2", "parallel.tensor=2", "--arms", "sagebwd", "train.total_tokens=512"]
    answer = sagebwd("recipe", tiny.name, *arguments, cwd=tiny.parent)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    meta = json.loads((tiny.parent / "runs/two/sagebwd/meta.json").read_text())
    assert (meta["world_size"], meta["layout"]) == (2, "tensor 2 x data 1")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recipe_that_is_asked_to_stop_ends_with_75_and_goes_on(tiny: Path, ranks: int) -> None:
    """As SLURM does it: SIGTERM to the command. With two ranks that is torchrun's parent."""
    here, name = tiny.parent, f"stopped{ranks}"
    command = [sys.executable, "-m", "sagebwd.cli", "recipe", tiny.name, f"name={name}", "--nproc", str(ranks)]
    command += ["checkpoint.every_steps=1000", "evaluation.every_steps=1000", "train.total_tokens=76800"]
    folder = here / "runs" / name / "fpa"
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (folder / "log.jsonl").exists() and '"step": 3' in (folder / "log.jsonl").read_text(), process)
        assert sagebwd("status", folder).returncode == 3
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    assert process.returncode == 75, output + errors
    assert "Traceback" not in output + errors
    assert "stopped: arm fpa was asked to" in errors
    assert not (here / "runs" / name / "sagebwd").exists()
    told = sagebwd("status", folder)
    assert told.returncode == 75
    assert "preempted" in told.stdout
    step = json.loads((folder / "status.json").read_text())["checkpoint"]
    assert step >= 3

    again = subprocess.run([*command, "--arms", "fpa"], cwd=here, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"going on after step {step}" in (folder / "log.txt").read_text()
    assert sagebwd("status", folder).returncode == 0


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


CELLS = ("256-s1", "1k-s1")
SWEEP = "sweep: {tokens_per_step: [256, 1024], seed: [1], learning_rate: {at: 256}, evaluations: 3, checkpoints: 2}"


def test_a_sweep_side_by_side_survives_a_failure_and_skips_what_is_finished(tiny: Path) -> None:
    here = tiny.parent
    (here / "sweep.yaml").write_text(f"extends: tiny.yaml\n{SWEEP}\n")
    names = sagebwd("arms", "sweep.yaml", cwd=here).stdout.split()
    assert names == [f"{cell}-{arm}" for cell in CELLS for arm in ("fpa", "sagebwd")]

    # The arm of index 1 by itself, as a SLURM array's task starts it; its results are skipped afterwards.
    assert sagebwd("train", "sweep.yaml", "--arm-index", "1", cwd=here).returncode == 0
    runs = here / "runs" / "sweep"
    assert [path.parent.name for path in runs.glob("*/meta.json")] == ["256-s1-sagebwd"]
    assert json.loads((runs / "experiment.json").read_text())["variants"]["1k-s1-fpa"] == "fpa"

    # One arm fails: a file stands where its checkpoints should go.
    (runs / "256-s1-fpa").mkdir()
    (runs / "256-s1-fpa" / "checkpoints").write_text("")
    first = sagebwd("recipe", "sweep.yaml", "--at-once", "2", cwd=here)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "arm 256-s1-sagebwd: done already" in first.stdout
    assert "error: arm 256-s1-fpa failed: its process ended with exit code 1" in first.stderr
    done = {name for name in names if json.loads((runs / name / "meta.json").read_text())["status"] == "done"}
    assert done == set(names) - {"256-s1-fpa"}

    (runs / "256-s1-fpa" / "checkpoints").unlink()
    second = sagebwd("recipe", "sweep.yaml", "--at-once", "2", cwd=here)
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.count("done already") == len(names) - 1
    assert (runs / "256-s1-fpa" / "log.txt").read_text().count("done, 12 steps") == 1
