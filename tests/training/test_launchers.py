"""`accelerate launch` and `deepspeed` start the training that our ranks do; their files must not contradict ours."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, check_world
from mpc_dist.runtime.zero import ZeroSettings, check_settings
from mpc_dist.training.accelerate import obey_accelerate
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.job import train
from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT

ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
TINY = (
    "--model.num_blocks 2 --model.width 16 --data.context 16 --data.max_bytes 30000 --training.steps 2 "
    "--training.log_every 1 --training.eval_batches 1"
).split()
SHARDED = "data_parallel: {degree: 2, sharding: deepspeed}\n"


def run(*command: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The launchers look for `python` and their helpers beside themselves.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


def accelerate(name: str, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch")
    file = ("--config_file", f"configs/accelerate/{name}.yaml")
    return run(*launcher, *file, "launch/train.py", *arguments, fails=fails)


def losses(folder: Path, num_ranks: int) -> dict[tuple[int, str], float]:
    lines = [line for rank in range(num_ranks) for line in read_metrics(folder, rank) if line["event"] == "step"]
    return {(line["step"], boundary): loss for line in lines for boundary, loss in line["losses"].items()}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train_locally(rank: int, arguments: tuple[str, ...]) -> None:
    config, _ = ConfigParser(arguments, prog="test", description="").parse()
    train(config, Launch(rank, config.num_ranks, rank), is_quiet=True)


@pytest.fixture(scope="module")
def without_launcher(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], float]:
    folder = tmp_path_factory.mktemp("local")
    config = str(ROOT / "configs/gpt_train.yaml")
    run_local_ranks(train_locally, 2, ("--config", config, *TINY, "--training.folder", str(folder)))
    return losses(folder, 2)


@pytest.mark.slow
def test_accelerate_starts_the_same_training(without_launcher, tmp_path):
    done = accelerate("cpu_2ranks", "--config", "configs/gpt_train.yaml", *TINY, "--training.folder", str(tmp_path))
    assert "test loss" in done.stdout
    assert losses(tmp_path, 2) == without_launcher
    assert len(without_launcher) == 2 * 2  # two steps, two readouts


@pytest.mark.slow
def test_the_deepspeed_launcher_starts_the_same_training(without_launcher, tmp_path):
    launcher = (str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()))
    arguments = ("--config", "configs/gpt_train.yaml", *TINY, "--training.folder", str(tmp_path))
    run(*launcher, "launch/train.py", *arguments)  # it adds --local_rank
    assert losses(tmp_path, 2) == without_launcher


@pytest.mark.slow
def test_the_accelerate_file_for_zero_trains_with_shared_optimizers(tmp_path):
    accelerate("zero", "--config", "configs/gpt_zero_small.yaml", *TINY, "--training.folder", str(tmp_path))
    assert len(losses(tmp_path, 4)) == 2 * 2


@pytest.mark.slow
def test_a_contradiction_between_the_files_ends_every_rank(tmp_path):
    arguments = ("--config", "configs/gpt_train.yaml", *TINY, "--training.precision", "bfloat16")
    done = accelerate("cpu_2ranks", *arguments, "--training.folder", str(tmp_path / "run"), fails=True)
    message = (
        "the accelerate file's mixed_precision asks for training.precision float32, but --training.precision sets it"
    )
    assert done.stderr.count(message) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_every_accelerate_file_is_read_by_accelerate_and_fits_its_configuration(path):
    """Through accelerate's own loader and launcher, up to the variables that our processes see."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = load_config_from_file(str(path))
    command = next(line for line in path.read_text().replace("\\\n#", "").splitlines() if "accelerate launch" in line)
    words = command.removeprefix("#").split()
    assert Path(words[3]).name == path.name
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        assert arguments.multi_gpu  # the launcher that starts several processes
        environment = prepare_multi_gpu_env(arguments)
    nodes = int(getattr(arguments, "nnodes", None) or 1)
    assert int(arguments.nproc_per_node) * nodes == file.num_processes
    launch = Launch.from_environment({**environment, "WORLD_SIZE": str(file.num_processes)})
    parser = ConfigParser(arguments.training_script_args, prog="test", description="")
    config = obey_accelerate(parser.parse()[0], launch.accelerate, parser.given())
    check_world(launch, num_stages=config.parallel.stages, num_replicas=config.data_parallel.degree)
    assert config.training.precision == {"bf16": "bfloat16", "no": "float32"}[file.mixed_precision]
    assert (config.data_parallel.sharding == "deepspeed") == arguments.use_deepspeed


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_every_deepspeed_file_is_taken_by_deepspeed(path):
    content = json.loads(path.read_text())
    assert content["gradient_clipping"] == 0.0  # DeepSpeed 0.19 clips to 1.0 unless told otherwise
    settings = ZeroSettings.read(path)
    assert settings.stage == content["zero_optimization"]["stage"] == int(path.stem[-1])
    check_settings(settings, None, "cpu")
    with pytest.raises(ValueError, match="DeepSpeed does not take zero_optimization"):
        check_settings(ZeroSettings(1, {"zero_optimization": {"bucket": 1}}), None, "cpu")


def parse(tmp_path: Path, text: str, *argv: str) -> tuple[Config, dict[str, str]]:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    parser = ConfigParser(["--config", str(path), *argv], prog="test", description="")
    return parser.parse()[0], parser.given()


def variables(**settings: str) -> dict[str, str]:
    return {"ACCELERATE_MIXED_PRECISION": "no"} | {f"ACCELERATE_{name}": value for name, value in settings.items()}


def test_what_our_configuration_leaves_open_the_accelerate_file_decides(tmp_path):
    config, given = parse(tmp_path, "data_parallel: {degree: 2}\n")
    said = variables(
        MIXED_PRECISION="bf16",
        USE_CPU="True",
        USE_DEEPSPEED="true",
        DEEPSPEED_ZERO_STAGE="2",
        GRADIENT_CLIPPING="0.5",
        GRADIENT_ACCUMULATION_STEPS="1",
        DYNAMO_BACKEND="NO",
    )
    found = obey_accelerate(config, said, given)
    assert (found.training.precision, found.training.clip_norm, found.device) == ("bfloat16", 0.5, "cpu")
    assert (found.data_parallel.sharding, found.data_parallel.stage) == ("deepspeed", 2)
    assert obey_accelerate(config, {}, given) is config
    assert obey_accelerate(found, said, {"training.precision": "a", "device": "b"}) is found  # they agree
    for theirs, ours in (("fp16", "float16"), ("no", "float32")):
        half, own = parse(tmp_path, "seed: 1\n")
        assert obey_accelerate(half, variables(MIXED_PRECISION=theirs), own).training.precision == ours
    double, own = parse(tmp_path, "training: {precision: float64}\n")
    assert obey_accelerate(double, variables(), own) is double  # accelerate has no word for it
    said = variables(USE_DEEPSPEED="true", DEEPSPEED_CONFIG_FILE="configs/deepspeed/zero2.json")
    zero = obey_accelerate(config, said, given).data_parallel.read_zero()
    assert zero is not None
    assert zero.stage == 2


@pytest.mark.parametrize(
    ("text", "argv", "said", "message"),
    [
        (
            "training: {precision: bfloat16}\n",
            [],
            {},
            r"file's mixed_precision asks for training.precision float32, but \S+config.yaml sets it to bfloat16",
        ),
        (
            "seed: 1\n",
            ["--training.precision=float32"],
            {"MIXED_PRECISION": "fp16"},
            "asks for training.precision float16, but --training.precision sets it to float32",
        ),
        ("device: auto\n", [], {"USE_CPU": "true"}, r"use_cpu asks for device cpu, but \S+ sets it to auto"),
        (
            "data_parallel: {degree: 2, sharding: none}\n",
            [],
            {"USE_DEEPSPEED": "true"},
            r"distributed_type DEEPSPEED asks for data_parallel.sharding deepspeed, but \S+config.yaml sets it to none",
        ),
        (
            SHARDED,
            ["--data_parallel.stage", "1"],
            {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "2"},
            "zero_stage asks for data_parallel.stage 2, but --data_parallel.stage sets it to 1",
        ),
        (
            SHARDED + "training: {clip_norm: 1.0}\n",
            [],
            {"USE_DEEPSPEED": "true", "GRADIENT_CLIPPING": "2.0"},
            r"gradient_clipping asks for training.clip_norm 2.0, but \S+ sets it to 1.0",
        ),
    ],
    ids=["precision", "precision-option", "device", "sharding", "stage", "clipping"],
)
def test_a_contradiction_names_both_places(tmp_path, text, argv, said, message):
    config, given = parse(tmp_path, text, *argv)
    with pytest.raises(ValueError, match=message):
        obey_accelerate(config, variables(**said), given)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"MIXED_PRECISION": "fp8"}, "mixed_precision 'fp8' .* is not supported; use bf16, fp16 or 'no'"),
        (
            {"USE_FSDP": "true"},
            "distributed_type FSDP .* is not supported; use distributed_type MULTI_GPU or",
        ),
        ({"DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_config"),
        ({"USE_DEEPSPEED": "true", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "offloads .* not supported"),
        ({"USE_DEEPSPEED": "true", "GRADIENT_ACCUMULATION_STEPS": "4"}, "contradicts parallel.microbatches"),
        ({"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3"}, "ZeRO stage 3 is not supported; use 1 or 2"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_what_we_cannot_do_of_an_accelerate_file_is_refused(tmp_path, said, message):
    config, given = parse(tmp_path, SHARDED)
    with pytest.raises(ValueError, match=message):
        obey_accelerate(config, variables(**said), given)


def test_the_number_of_processes_is_held_against_stages_and_replicas():
    launch = Launch.from_environment({"WORLD_SIZE": "3", **variables()})
    with pytest.raises(ValueError, match=r"3 processes .* need 4; start 4 \(num_processes of the accelerate file"):
        check_world(launch, num_stages=2, num_replicas=2)
    assert Launch.from_environment({"ACCELERATE_LOG_LEVEL": "info"}) == Launch()  # left over in a shell


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_parallel: {sharding: deepspeed}\n", "data_parallel.degree is 1; use 2 or more, or sharding none"),
        ("data_parallel: {degree: 2, stage: 1}\n", "need data_parallel.sharding deepspeed, got none"),
        (SHARDED + "horizon: {mode: adaptive}\n", "horizon.mode adaptive adds readouts .* use another mode"),
        (SHARDED + "training: {precision: float64}\n", "weights in float32, got training.precision float64"),
        (
            SHARDED + "training: {precision: bfloat16, bfloat16_weights: true}\n",
            "weights in float32, got training.bfloat16_weights true",
        ),
        (SHARDED + "training: {precision: float16}\n", "deepspeed cannot leave out a step"),
        (
            "data_parallel: {degree: 2, sharding: deepspeed, deepspeed_config: configs/deepspeed/zero1.json}\n"
            "training: {clip_norm: 1.0}\n",
            "configs/deepspeed/zero1.json sets gradient_clipping 0.0 but training.clip_norm is 1; make them agree",
        ),
        ("data_parallel: {degree: 2, sharding: deepspeed, deepspeed_config: none.json}\n", "none.json does not exist"),
    ],
    ids=["degree", "unused", "adaptive", "float64", "bfloat16", "float16", "clipping", "file"],
)
def test_sharding_that_cannot_work_is_refused_by_the_configuration(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, text)
