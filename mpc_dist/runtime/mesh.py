"""Which rank does what: pipeline stages x data-parallel replicas. The only reader of the launcher's environment.

Replicas of a stage are neighbours in rank: rank = stage * num_replicas + replica. So on a host with several GPUs, the
all-reduces of a stage stay on the host, and only activations cross between hosts.

No rank is connected to all others: neighbours have groups of two, and in the groups of many a connection is made when
it is first used, so that a rank has a number of them that grows with the logarithm of the number of ranks.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _abort_process_group, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from mpc_dist.runtime.interface import find_interface, find_loopback
from mpc_dist.runtime.meeting import meet
from mpc_dist.runtime.watch import DeviceWaits, PeerError, Watch


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    accelerate: Mapping[str, str] = field(default_factory=dict)
    """The ACCELERATE_* variables, in which `accelerate launch` hands on its file; empty under other launchers."""
    job: str | None = None
    """What the job is called, over all its attempts; None if nothing would start it again."""
    attempt: int = 0
    """How often the job was started before: by torchrun after a failure, or by Slurm after a requeue."""
    restarts_left: int = 0
    """How often the launcher would start the job again if a rank failed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        """As set by torchrun, accelerate and deepspeed; a single process without them."""
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        attempts = dict.fromkeys(
            ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"), "0"
        )
        try:
            rank, world_size, local_rank = (int(environment.get(name, given)) for name, given in defaults.items())
        except ValueError as error:
            raise ValueError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})") from error
        try:
            restarts, most, requeues = (int(environment.get(name, "0")) for name in attempts)
        except ValueError as error:
            raise ValueError(f"{', '.join(attempts)} must be whole numbers ({error})") from error
        accelerate = {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}
        # It always sets this one; others may be left over in a shell.
        is_launched = "ACCELERATE_MIXED_PRECISION" in accelerate
        return cls(
            rank,
            world_size,
            local_rank,
            accelerate if is_launched else {},
            job=environment.get("TORCHELASTIC_RUN_ID"),
            attempt=restarts + requeues,
            restarts_left=max(0, most - restarts),
        )


@dataclass(frozen=True)
class Edge:
    """Between this rank and a neighbouring stage of its replica: a group of two for each direction.

    NCCL would make one direction, or one neighbour, wait for the other in a group that they share.
    """

    peer: int
    """The neighbour's global rank."""
    downward: dist.ProcessGroup
    """Carries activations."""
    upward: dist.ProcessGroup
    """Carries adjoints."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place and its groups."""

    stage: int
    num_stages: int
    replica: int
    num_replicas: int
    device: torch.device
    ranks_of_stages: tuple[int, ...]
    """The global ranks of this replica's stages, in order."""
    before: Edge | None = None
    """To the stage before; None on the first."""
    after: Edge | None = None
    """To the stage after; None on the last."""
    stages: dist.ProcessGroup | None = None
    """All stages of this replica, for what concerns them all."""
    replicas: dist.ProcessGroup | None = None
    """All replicas of this stage; None if there is one."""
    background: dist.ProcessGroup | None = None
    """All ranks, for a thread that works beside training; on the CPU whatever the device is."""
    timeout: timedelta = timedelta(minutes=10)
    """How long anything waits for another rank."""
    watch: Watch = field(default_factory=Watch)
    """What this rank waits for."""

    def with_timeout(self, timeout: timedelta) -> "Mesh":
        """The same mesh; from now on its groups, and that of all ranks, wait so long."""
        edges = [edge for edge in (self.before, self.after) if edge is not None]
        groups = [self.stages, self.replicas, self.background, *(edge.downward for edge in edges)]
        groups += [edge.upward for edge in edges]
        if self.stages is not None:
            for group in (dist.group.WORLD, *(group for group in groups if group is not None)):
                _set_pg_timeout(timeout, group)
        return replace(self, timeout=timeout)


def check_world(launch: Launch, *, num_stages: int, num_replicas: int) -> None:
    """Raise unless the launcher started as many processes as the configuration needs."""
    needed = num_stages * num_replicas
    if launch.world_size != needed:
        started = "num_processes of the accelerate file" if launch.accelerate else "torchrun --nproc-per-node"
        raise ValueError(
            f"{launch.world_size} processes were started, but {num_stages} stages x {num_replicas} replicas need "
            f"{needed}; start {needed} ({started}), or set parallel.stages and data_parallel.degree so"
        )


def build_mesh(
    launch: Launch,
    *,
    num_stages: int,
    num_replicas: int = 1,
    device_type: str = "cpu",
    timeout: timedelta,
    watch: Watch | None = None,
) -> Mesh:
    """Join the process group, if there is more than one process, and find this rank's place in it.

    Whom it waits for meanwhile can be read in `watch`.
    """
    check_world(launch, num_stages=num_stages, num_replicas=num_replicas)
    device = use_device(launch, device_type)
    watch = watch or Watch(launch.rank)
    if device.type == "cuda":
        watch.device = DeviceWaits()
    if launch.world_size == 1:
        return Mesh(0, 1, 0, 1, device, (0,), watch=watch)
    join(launch, device.type, timeout.total_seconds())
    stage, replica = divmod(launch.rank, num_replicas)
    # Every process makes every group, in the same order, as torch requires. A device mesh's groups would wait for half
    # an hour whatever the timeout is.
    columns = [[s * num_replicas + other for s in range(num_stages)] for other in range(num_replicas)]
    rows = [[s * num_replicas + other for other in range(num_replicas)] for s in range(num_stages)]

    def own_group(all_ranks: list[list[int]]) -> dist.ProcessGroup:
        groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout) for ranks in all_ranks]
        (own,) = (group for group, ranks in zip(groups, all_ranks, strict=True) if launch.rank in ranks)
        return own

    edges: dict[int, Edge] = {}
    with watch.waiting(None, "the making of groups"):
        for lower, upper in (pair for column in columns for pair in pairwise(column)):
            downward, upward = (dist.new_group([lower, upper], timeout=timeout) for _ in range(2))
            if launch.rank in (lower, upper):
                peer = upper if launch.rank == lower else lower
                edges[peer] = Edge(peer, downward, upward)
        stages, replicas = own_group(columns), own_group(rows) if num_replicas > 1 else None
        background = dist.new_group(backend="gloo", timeout=timeout)
    mesh = Mesh(
        stage,
        num_stages,
        replica,
        num_replicas,
        device,
        tuple(s * num_replicas + replica for s in range(num_stages)),
        before=edges.get(launch.rank - num_replicas),
        after=edges.get(launch.rank + num_replicas),
        stages=stages,
        replicas=replicas,
        background=background,
        timeout=timeout,
        watch=watch,
    )
    _connect_neighbours(mesh)
    return mesh


def _connect_neighbours(mesh: Mesh) -> None:
    """Send a word along every edge, both ways: who first uses a connection waits there until its peer uses it, too.

    Of two edges of a rank, the one that begins at an even stage is first, so that no chain of ranks forms.
    """
    first, second = (mesh.after, mesh.before) if mesh.stage % 2 == 0 else (mesh.before, mesh.after)
    for edge in (first, second):
        if edge is None:
            continue
        word = torch.zeros(1, device=mesh.device)
        with mesh.watch.waiting(edge.downward, f"the connection to rank {edge.peer}"):
            if edge is mesh.after:
                dist.send(word, dst=edge.peer, group=edge.downward)
                dist.recv(word, src=edge.peer, group=edge.upward)
            else:
                dist.recv(word, src=edge.peer, group=edge.downward)
                dist.send(word, dst=edge.peer, group=edge.upward)


def use_device(launch: Launch, device_type: str) -> torch.device:
    """This rank's device; on a GPU it becomes the current one, by which libraries move whatever they send."""
    if device_type != "cuda":
        return torch.device(device_type)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all work of a GPU into one queue, in which a message that is awaited "
            "holds up what would send it: the ranks would hang; unset it"
        )
    device = torch.device(device_type, launch.local_rank)
    torch.cuda.set_device(device)
    return device


def connect_on_use() -> None:
    """Let groups that are made from now on connect two ranks when they first talk: gloo would connect all with all."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # the only way to tell it


def join(launch: Launch, device_type: str, timeout: float) -> None:
    """Join the process group, if there is more than one process and it has not been joined yet."""
    use_device(launch, device_type)
    if launch.world_size > 1 and not dist.is_initialized():
        backend, limit = "nccl" if device_type == "cuda" else "gloo", timedelta(seconds=timeout)
        try:
            shared, rank, num_ranks = next(rendezvous("env://", launch.rank, launch.world_size, timeout=limit))
            store = meet(shared, rank=rank, num_ranks=num_ranks, timeout=limit)
            if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _choose_interface(store, num_ranks, limit)):
                os.environ["GLOO_SOCKET_IFNAME"] = interface  # the only way to tell gloo
            connect_on_use()
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"rank {launch.rank} did not meet the other {launch.world_size - 1} within {timeout:g} s: "
                f"{str(error).splitlines()[0]}"
            ) from error


def _choose_interface(store: Store, num_ranks: int, timeout: timedelta) -> str | None:
    """Where gloo listens: on one host the loopback, else it would be the host's public address."""
    if is_one_host(os.environ):
        return find_loopback()
    master = os.environ["MASTER_ADDR"]
    try:
        return find_interface(PrefixStore("interface", store), master=master, num_ranks=num_ranks, timeout=timeout)
    except OSError as error:
        raise PeerError(f"no way to MASTER_ADDR {master!r} was found: {error}; check its name and network") from error


def is_one_host(environment: Mapping[str, str]) -> bool:
    """Whether the launcher says that all ranks are on this host."""
    here = environment.get("LOCAL_WORLD_SIZE")
    return here is not None and here == environment.get("WORLD_SIZE")


def leave(*, has_failed: bool = False) -> None:
    """Leave the process group, if there is one."""
    if not dist.is_initialized():
        return
    if has_failed and dist.get_backend() == "nccl":
        _abort_process_group()  # to leave in order would wait for kernels that wait for ranks that are gone
    else:
        dist.destroy_process_group()
