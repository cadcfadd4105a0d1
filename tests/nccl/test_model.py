"""The strict model hangs where NCCL may, and only there: each rule by the smallest job that breaks it."""

import pytest

from tests.nccl.model import Call, Devices, HangError

PAIR = {"down": (0, 1), "up": (0, 1), "both": (0, 1), "first": (0, 1), "second": (0, 1)}


def send(number: int, group: str, peer: int) -> Call:
    return Call("send", number, group, peer)


def receive(number: int, group: str, peer: int) -> Call:
    return Call("receive", number, group, peer)


def collective(number: int, group: str) -> Call:
    return Call("collective", number, group)


def stream_wait(number: int) -> Call:
    return Call("stream wait", number)


def host_wait(number: int) -> Call:
    return Call("host wait", number)


KERNEL, READ, DEVICE_WAIT = Call("kernel"), Call("read"), Call("device wait")
# The first transfer of each direction, in one order on both ranks.
CONNECT = (
    [send(100, "down", 1), receive(101, "up", 1), host_wait(100), host_wait(101)],
    [receive(100, "down", 0), send(101, "up", 0), host_wait(100), host_wait(101)],
)


def run(first: list[Call], second: list[Call], **rules: bool) -> None:
    Devices([first, second], PAIR, **rules).run()


def test_messages_in_order_arrive():
    run(
        [*CONNECT[0], KERNEL, send(0, "down", 1), receive(1, "up", 1), stream_wait(1), KERNEL, host_wait(0), READ],
        [*CONNECT[1], receive(0, "down", 0), stream_wait(0), KERNEL, send(1, "up", 0), host_wait(1)],
    )


def test_the_first_use_of_a_direction_blocks_both_hosts():
    """Each host waits in the making of a communicator to which the other has not come."""
    with pytest.raises(HangError):
        run(
            [receive(0, "up", 1), send(1, "down", 1), stream_wait(0)],
            [receive(1, "down", 0), stream_wait(1), send(0, "up", 0)],
        )
    run(
        [*CONNECT[0], receive(0, "up", 1), send(1, "down", 1), stream_wait(0)],
        [*CONNECT[1], receive(1, "down", 0), stream_wait(1), send(0, "up", 0)],
    )


def test_a_communicator_for_both_directions_is_one_line():
    met = (
        [send(100, "both", 1), receive(101, "both", 1), host_wait(100), host_wait(101)],
        [receive(100, "both", 0), send(101, "both", 0), host_wait(100), host_wait(101)],
    )
    with pytest.raises(HangError):
        run(
            [*met[0], receive(0, "both", 1), send(1, "both", 1)],
            [*met[1], receive(1, "both", 0), send(0, "both", 0)],
        )


def test_a_send_is_a_rendezvous():
    with pytest.raises(HangError):
        run(
            [*CONNECT[0], send(0, "down", 1), host_wait(0), receive(1, "up", 1)],
            [*CONNECT[1], send(1, "up", 0), host_wait(1), receive(0, "down", 0)],
        )


def test_what_is_sent_waits_for_what_the_compute_stream_waits_for():
    """The host goes on at once, the device does not."""
    with pytest.raises(HangError):
        run(
            [*CONNECT[0], receive(0, "up", 1), stream_wait(0), KERNEL, send(1, "down", 1)],
            [*CONNECT[1], receive(1, "down", 0), stream_wait(1), KERNEL, send(0, "up", 0)],
        )


def test_a_read_waits_for_the_compute_stream_only():
    posted_ahead = [*CONNECT[0], receive(0, "up", 1), KERNEL, READ, send(1, "down", 1), stream_wait(0)]
    answer = [*CONNECT[1], receive(1, "down", 0), stream_wait(1), KERNEL, send(0, "up", 0)]
    run(posted_ahead, answer)
    with pytest.raises(HangError):
        run([DEVICE_WAIT if call == READ else call for call in posted_ahead], answer)


def test_a_wait_for_the_device_is_tried_at_every_place():
    ahead = [*CONNECT[0], receive(0, "up", 1), send(1, "down", 1), stream_wait(0)]
    reached = [*CONNECT[0], send(1, "down", 1), receive(0, "up", 1), stream_wait(0)]
    answer = [*CONNECT[1], receive(1, "down", 0), stream_wait(1), KERNEL, send(0, "up", 0)]
    with pytest.raises(HangError, match="rank 0 waits for its device before call 5"):
        Devices([ahead, answer], PAIR).run_with_device_wait(0)
    for rank in range(2):
        Devices([reached, answer], PAIR).run_with_device_wait(rank)


def test_collectives_of_several_communicators_are_in_one_order():
    met = [collective(100, "first"), collective(101, "second")]
    run(
        [*met, collective(0, "first"), collective(1, "second")],
        [*met, collective(0, "first"), collective(1, "second")],
    )
    with pytest.raises(HangError):
        run(
            [*met, collective(0, "first"), collective(1, "second")],
            [*met, collective(1, "second"), collective(0, "first")],
        )


def test_one_hardware_queue_holds_kernels_back_behind_a_receive():
    first = [*CONNECT[0], receive(0, "up", 1), KERNEL, send(1, "down", 1), stream_wait(0)]
    second = [*CONNECT[1], receive(1, "down", 0), stream_wait(1), KERNEL, send(0, "up", 0)]
    run(first, second)
    with pytest.raises(HangError):
        run(first, second, one_queue=True)


def test_transfers_of_hosts_know_no_streams():
    """gloo's: nothing on the device waits for them, but the host does."""
    call = Call("collective", 0, "first", is_on_host=True)
    run([call, stream_wait(0)], [call, stream_wait(0)])
    with pytest.raises(HangError):
        run([call, stream_wait(0)], [KERNEL])
