"""Segments: runs of a stage's blocks that every adjoint treats alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_dist.schedule import lay_out, split_evenly
from mpc_dist.windows import backprop, expand, group, sliding, tumbling
from tests.schedule.layouts import named_windows, partitions


def test_a_horizon_in_stages_makes_one_segment_per_stage():
    windows = expand(sliding(3, 2), [2, 1, 3])
    assert [aims[0][0] for aims in windows.targets] == [3, 3, 6, 6, 6, 6]
    layout = lay_out(windows, [2, 1, 3])
    assert layout.blocks == (range(2), range(2, 3), range(3, 6))
    assert layout.windows == sliding(3, 2)
    assert layout.span == 2


def test_block_level_windows_cut_a_stage_where_they_change():
    layout = lay_out(tumbling(6, 2), [4, 2])
    assert layout.blocks == (range(2), range(2, 4), range(4, 6))
    assert layout.ranks == (0, 0, 1)
    assert layout.windows == sliding(3, 1)
    assert layout.segments == (range(2), range(2, 3))
    assert layout.stage_blocks(0) == range(4)
    assert layout.span == 1


def test_backprop_makes_one_segment_per_stage():
    layout = lay_out(backprop(7), split_evenly(7, 3))
    assert layout.blocks == (range(3), range(3, 5), range(5, 7))
    assert layout.span == 3


@given(named_windows(), st.data())
def test_segments_keep_every_blocks_windows(windows, data):
    partition = data.draw(partitions(windows.num_blocks))
    layout = lay_out(windows, partition)
    sizes = [len(blocks) for blocks in layout.blocks]
    assert expand(layout.windows, sizes) == windows
    assert group(windows, sizes) == layout.windows
    assert [len(layout.stage_blocks(rank)) for rank in range(layout.num_ranks)] == list(partition)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([2, 2], r"partition 2\|2 has 4 blocks but the model 5; make the sizes sum to that"),
        ([5, 0], r"number of blocks of stage 1: 0 is out of range"),
        ([], "no stage; give sizes that sum to the model's 5 blocks"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(partition, message):
    with pytest.raises(ValueError, match=message):
        lay_out(backprop(5), partition)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match=r"number of stages: 6 is out of range; use 1\.\.5"):
        split_evenly(5, 6)
