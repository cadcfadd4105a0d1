"""Per rank, sockets and opened files do not grow with the number of ranks as they would if all were connected."""

import pytest

from mpc_dist.bench.growth import BYTES_PER_RANK, bench_growth, check_memory, write_page


def test_sockets_and_opens_per_rank_stay_few():
    four, twelve = bench_growth([4, 12])
    # Four groups of two and three of many, each with a socket to listen at; and what trees and rings connect.
    assert twelve.extra["most_sockets"] <= four.extra["most_sockets"] + 8
    assert twelve.extra["most_sockets"] < 2 * 12  # five groups that connect all with all would take 60
    # The state, to check and to read it, and one file: to check, for weights, optimizer and random numbers.
    assert four.extra["opens_per_rank"] <= 10
    assert twelve.extra["opens_per_rank"] <= 10
    assert write_page([four, twelve]).count("\n") == 3


def test_more_processes_than_memory_has_room_for_are_refused():
    check_memory(8, 12 * BYTES_PER_RANK)
    with pytest.raises(ValueError, match=r"9 ranks need \d+ MiB here; use at most 8"):
        check_memory(9, 12 * BYTES_PER_RANK)
