"""Per rank, sockets and opened files do not grow with the number of ranks as they would if all were connected."""

from mpc_dist.bench.growth import bench_growth, write_page


def test_sockets_and_opens_per_rank_stay_few():
    four, twelve = bench_growth([4, 12])
    # Four groups of two and three of many, each with a socket to listen at; and what trees and rings connect.
    assert twelve.extra["most_sockets"] <= four.extra["most_sockets"] + 8
    assert twelve.extra["most_sockets"] < 2 * 12  # five groups that connect all with all would take 60
    # The state, to check and to read it, and one file: to check, for weights, optimizer and random numbers.
    assert four.extra["opens_per_rank"] <= 10
    assert twelve.extra["opens_per_rank"] <= 10
    assert write_page([four, twelve]).count("\n") == 3
