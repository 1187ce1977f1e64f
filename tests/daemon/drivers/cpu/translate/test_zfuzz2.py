import os, random, pytest
from test_lanes import nested_program, run_both


@pytest.mark.parametrize("seed", range(int(os.environ["LO"]), int(os.environ["HI"])))
def test_fuzz(run_block, monkeypatch, seed):
    draw = random.Random(seed)
    block = draw.choice([(1, 1, 1), (7, 1, 1), (16, 1, 1), (37, 1, 1), (5, 3, 2), (17, 2, 2), (32, 2, 1)])
    run_both(run_block, monkeypatch, nested_program(draw), block[0] * block[1] * block[2], block)
