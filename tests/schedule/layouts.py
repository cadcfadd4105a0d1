"""Random layouts of every kind of windows."""

from hypothesis import strategies as st

from mpc_dist.schedule import Layout, lay_out
from mpc_dist.windows import Windows, backprop, cumulative, loco, sliding, tumbling
from tests.test_windows import window_maps


@st.composite
def named_windows(draw: st.DrawFn, max_blocks: int = 9) -> Windows:
    """Sliding (with and without anchors), tumbling, cumulative, LoCo and back-propagation."""
    T = draw(st.integers(1, max_blocks))
    h = draw(st.integers(1, T))
    anchors = draw(st.sets(st.integers(1, T)).map(lambda chosen: sorted(chosen | {T})))
    maps = [sliding(T, h), sliding(T, h, anchors), tumbling(T, h), cumulative(T, h), backprop(T)]
    return draw(st.sampled_from([*maps, loco(T)] if T > 1 else maps))


@st.composite
def partitions(draw: st.DrawFn, num_blocks: int, max_stages: int = 9) -> tuple[int, ...]:
    """Sizes of stages, also uneven."""
    most = min(num_blocks, max_stages) - 1
    cuts = draw(st.sets(st.integers(1, num_blocks - 1), max_size=most)) if num_blocks > 1 else set()
    ends = [*sorted(cuts), num_blocks]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any windows on any partition."""
    windows = draw(named_windows() | window_maps())
    return lay_out(windows, draw(partitions(windows.num_blocks)))
