"""Recipes as jobs of a real SLURM: to the end, and through preemption, requeues and time limits without a changed loss.

The jobs of all stories run side by side, since each spends most of its time in imports and in SLURM's queue.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sagebwd.training import status
from tests.launch.cluster import Slurm
from tests.launch.nodes import Node
from tests.training.runs import logged

pytest_plugins = ("tests.launch.cluster", "tests.launch.nodes", "tests.small_corpus")
SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sh"
FINISHED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
TAGS = ("train/loss", "train/grad_norm", "train/learning_rate", "validation/loss")
STEPS = 400  # long enough to be met in the middle
LONG = f"train.total_tokens={STEPS * 256}"


@dataclass(frozen=True)
class Scene:
    slurm: Slurm
    place: Path

    def submit(self, *arguments: str) -> str:
        """The number of the submitted job."""
        answer = self.slurm.run(SCRIPT, "tiny.yaml", *arguments, cwd=self.place)
        return re.search(r"Submitted batch job (\d+)", answer)[1]

    def log(self, run: str, task: int = 0) -> str:
        return "".join(path.read_text() for path in self.place.glob(f"runs/{run}/_slurm/*/*_{task}.log"))

    def wait_for_step(self, job: str, run: str, step: int) -> None:
        """Until the job's first process has trained that far."""
        self.slurm.wait(job, lambda _: f"\nstep {step}/" in self.log(run), 400)

    def ended(self, job: str, seconds: float = 400) -> dict[str, str]:
        return self.slurm.wait(job, lambda found: found["JobState"] in FINISHED, seconds)

    def check_unbroken(self, run: str, unbroken: Path) -> None:
        """Every point is there once, with the value that it has without any interruption."""
        ours, theirs = logged(self.place / "runs" / run / "fpa").scalars, logged(unbroken).scalars
        for tag in TAGS:
            assert ours[tag] == theirs[tag], (run, tag, self.log(run))
        assert [step for step, _ in ours["train/loss"]] == list(range(1, len(theirs["train/loss"]) + 1))


def an_array_of_arms(scene: Scene) -> None:
    """Every arm to its end, then the comparison; by the recipe as it was when it was submitted."""
    recipe = scene.place / "array.yaml"
    recipe.write_text((scene.place / "tiny.yaml").read_text())
    answer = scene.slurm.run(SCRIPT, "array.yaml", "--cpus", "2", cwd=scene.place)
    recipe.write_text("not: [a recipe")
    job = re.search(r"Submitted batch job (\d+)", answer)[1]
    assert "\\\n" not in answer
    assert re.search(r"^sbatch --job-name=sagebwd-array --array=0-1 --nodes=1 .* array\.yaml $", answer, re.MULTILINE)
    for task, arm in enumerate(("fpa", "sagebwd")):
        found = scene.ended(f"{job}_{task}")
        assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "0"), scene.log("array", task)
        assert f"arm {arm} is finished" in scene.log("array", task)
        assert len(logged(scene.place / "runs" / "array" / arm).scalars["train/loss"]) == 12
    assert (scene.place / "runs" / "array" / "report" / "report.md").exists(), scene.log("array", 0) + scene.log(
        "array", 1
    )
    # The ranks ran the copy, not the repository.
    snapshot = next(scene.place.glob("runs/array/_slurm/*"))
    assert (snapshot / "code" / "sagebwd" / "COMMIT").exists()
    assert str(snapshot / "launch" / "torchrun.sh") in scene.log("array")


def a_signal_to_the_ranks(scene: Scene, unbroken: Path) -> None:
    """As a scheduler's preemption hook sends it: the job saves, requeues itself and goes on."""
    job = scene.submit("--cpus", "1", "--arms", "fpa", "name=signal", LONG)
    scene.wait_for_step(job, "signal", STEPS // 20 * 3)
    scene.slurm.run("scancel", "--signal=USR1", job)
    found = scene.ended(job)
    log = scene.log("signal")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), log
    assert re.search(r"requeued, to go on from checkpoint step_0*\d+", log)
    scene.check_unbroken("signal", unbroken)


def a_requeue_by_the_administrator(scene: Scene, unbroken: Path) -> None:
    """SLURM sends SIGTERM to all, and kills what is left after KillWait."""
    job = scene.submit("--cpus", "1", "--arms", "fpa", "name=requeue", LONG)
    scene.wait_for_step(job, "requeue", STEPS // 20 * 3)
    scene.slurm.run("scontrol", "requeue", f"{job}_0")
    found = scene.ended(job)
    log = scene.log("requeue")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), log
    assert re.search(r"asked to stop \(SIGTERM or SIGUSR1\) after step (\d+)", log)
    scene.check_unbroken("requeue", unbroken)


def a_time_limit(scene: Scene) -> None:
    """The job is told before it, saves, and goes on after a requeue, with a limit of its own.

    The limit is set once the run has begun, two minutes ahead at most, so that a slow machine's imports do not count.
    SLURM looks at limits every 30 seconds, and sends the signal 30 to 60 seconds before this one.
    """
    long = f"train.total_tokens={12_000 * 256}"
    job = scene.submit("--cpus", "1", "--arms", "fpa", "name=limit", long, "--", "--time=60", "--signal=B:USR1@30")
    scene.wait_for_step(job, "limit", 1)
    hours, minutes, _ = map(int, scene.slurm.job(job)["RunTime"].split(":"))
    scene.slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
    scene.slurm.wait(job, lambda _: "requeued, to go on" in scene.log("limit"), 400)
    scene.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    scene.slurm.wait(job, lambda _: "going on after step" in scene.log("limit"), 400)
    log = scene.log("limit")
    assert log.index("SIGUSR1 has come") < log.index("requeued, to go on from checkpoint step_")
    assert "DUE TO TIME LIMIT" not in log
    scene.slurm.run("scancel", job)
    assert scene.ended(job)["JobState"] == "CANCELLED"


def no_progress(scene: Scene) -> None:
    """Stopped twice before the first step: the job ends with the cause instead of coming back for ever."""
    job = scene.submit("--cpus", "1", "--arms", "fpa", "name=fruitless", LONG)
    for start in (1, 2):
        scene.slurm.wait(job, lambda _, start=start: f"start {start}: arm fpa on" in scene.log("fruitless"), 120)
        scene.slurm.run("scancel", "--signal=USR1", "--batch", job)
    found = scene.ended(job)
    log = scene.log("fruitless")
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "1:0"), log
    assert "stopped again with no newer checkpoint (newest: none): give a longer --time" in log


def a_mistake(scene: Scene) -> None:
    """What only the job can see ends it with the sentence, and is not tried again."""
    job = scene.submit("--cpus", "1", "--arms", "fpa", "name=mistake", "data.files=[nothing.jsonl]")
    found = scene.ended(job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")
    assert "error: data.files: no file matches 'nothing.jsonl'" in scene.log("mistake")


def test_jobs_survive_what_slurm_does(slurm: Slurm, place: Path, environment: dict[str, str]) -> None:
    scene = Scene(replace(slurm, environment=environment | slurm.environment), place)
    train = [sys.executable, "-m", "sagebwd.cli", "train", "tiny.yaml", "--arm", "fpa", "name=unbroken", LONG]
    unbroken = place / "runs" / "unbroken" / "fpa"
    with ThreadPoolExecutor(7) as pool:
        alone = [pool.submit(story, scene) for story in (an_array_of_arms, a_time_limit, no_progress, a_mistake)]
        subprocess.run(train, cwd=place, env=environment, check=True, capture_output=True)
        compared = [
            pool.submit(story, scene, unbroken) for story in (a_signal_to_the_ranks, a_requeue_by_the_administrator)
        ]
        failures = [error for future in (*alone, *compared) if (error := future.exception())]
    if failures:
        raise ExceptionGroup("of the stories", failures)


def test_a_job_on_two_nodes(
    slurm_of_two: Slurm, nodes: tuple[Node, Node], place: Path, environment: dict[str, str]
) -> None:
    """Through a signal, and through a network between the nodes that fails for a while: the losses of two ranks on one
    node."""
    scene = Scene(replace(slurm_of_two, environment=environment | slurm_of_two.environment), place)
    folder, long = place / "runs" / "two" / "fpa", (LONG, "health.hang_minutes=0.2")
    job = scene.submit("--cpus", "1", "--nodes", "2", "--arms", "fpa", "name=two", *long)
    command = [SCRIPT.with_name("torchrun.sh"), "tiny.yaml", "fpa", "--nproc", "2", "name=unbroken", *long]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    on_one = subprocess.Popen(command, cwd=place, env=environment, **options)
    scene.wait_for_step(job, "two", STEPS // 20 * 3)
    scene.slurm.run("scancel", "--signal=USR1", job)
    scene.wait_for_step(job, "two", STEPS // 20 * 8)
    nodes[1].link("down")
    scene.slurm.wait(job, lambda _: status.read(folder).state == "failed", 200)
    nodes[1].link("up")
    found, log = scene.ended(job), scene.log("two")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "2"), log
    assert re.search(rf" --nproc 1 --nodes 2 --head {re.escape(nodes[0].address)}:\d+ ", log), log
    assert re.search(r"start 3: arm fpa on 2 node\(s\): node\[1-2\]\n", log), log
    assert re.search(r"no progress for 0\.2 minutes .*: rank 1 \(process \d+ on node2\) does not answer", log), log
    said, _ = on_one.communicate(timeout=200)
    assert on_one.returncode == 0, said
    scene.check_unbroken("two", place / "runs" / "unbroken" / "fpa")


# What needs no cluster


def slurm_sh(place: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "give a recipe"),
        ("tiny.yaml", "give --gpus N, the GPUs of a node, or --cpus N"),
        ("tiny.yaml --gpus 1 --cpus 1", "--gpus and --cpus exclude each other"),
        ("tiny.yaml --gpus all", "--gpus or --cpus is 'all', not a number"),
        ("tiny.yaml --gpus 8 --nodes some", "--nodes is 'some', not a number of nodes"),
        ("tiny.yaml --gpus 8 --time=1:00", "unknown option --time=1:00; sbatch's own come after --"),
        ("tiny.yaml --gpus 3 --dry-run", "train.tokens_per_step"),
        ("tiny.yaml --gpus 1 --arms sage --dry-run", "has no arm 'sage': did you mean 'sagebwd'?"),
    ],
)
def test_a_mistake_is_one_line(place: Path, environment: dict[str, str], arguments: str, complaint: str) -> None:
    answer = slurm_sh(place, environment, *arguments.split())
    assert (answer.returncode, answer.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", answer.stderr), answer.stderr
    assert complaint in answer.stderr
    assert not (place / "runs").exists()


def test_a_dry_run_prints_the_command_and_writes_nothing(place: Path, environment: dict[str, str]) -> None:
    arguments = "tiny.yaml --gpus 4 --nodes 2 --arms sagebwd --dry-run train.micro_batch=1 -- --partition=gpu"
    answer = slurm_sh(place, environment, *arguments.split())
    assert answer.returncode == 0, answer.stderr
    assert re.fullmatch(
        r"sbatch --job-name=sagebwd-tiny --array=0-0 --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --output=\S+ "
        r"--partition=gpu \S+/launch/slurm\.sbatch --snapshot \S+ --python \S+ --nproc 4 --name tiny --arms sagebwd "
        r"--runs \S+/runs --data \S+/data tiny\.yaml train\.micro_batch=1 \n",
        answer.stdout,
    )
    assert [path.name for path in place.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--snapshot", "--snapshot needs a value"),
        ("--snapshot x --frob y", "unknown option --frob"),
        ("--snapshot x recipe.yaml", "--python is missing"),
    ],
)
def test_a_mistake_in_a_job_s_own_command_is_one_line(arguments: str, complaint: str) -> None:
    command = [SCRIPT.with_name("slurm.sbatch"), *arguments.split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"error: {complaint} (see slurm.sbatch --help)\n"


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh", "slurm.sbatch", "setup.sh"])
def test_help(script: str) -> None:
    answer = subprocess.run([SCRIPT.with_name(script), "--help"], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.lower().startswith("usage: ")
