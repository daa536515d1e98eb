"""Seeds of random draws."""

from rlhf_cli.data.sampling import derive_seed


def test_seeds_depend_on_every_part():
    keys = [(0, "sample", 1, 2), (1, "sample", 1, 2), (0, "shuffle", 1, 2), (0, "sample", 2, 2), (0, "sample", 1, 3)]
    keys.append((0, "sample", 12))
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(*keys[0]) == derive_seed(*keys[0])
