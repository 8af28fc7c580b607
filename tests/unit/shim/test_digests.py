"""Prompt digests: equal for equal prefixes, different for everything that changes KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_shim.digests import DIGEST_SIZE, PromptDigest

tokens = st.lists(st.integers(0, 2**40), max_size=60)


def one(token_ids: list[int], position: int, **parts: object) -> bytes:
    return PromptDigest(token_ids, **parts).at([position])[0]  # type: ignore[arg-type]


@given(tokens, tokens, st.data())
def test_it_is_a_function_of_the_prefix(a: list[int], b: list[int], data: st.DataObject) -> None:
    p = data.draw(st.integers(0, min(len(a), len(b))))
    assert (one(a, p) == one(b, p)) == (a[:p] == b[:p])


@given(tokens, st.integers(1, 20), st.integers(1, 20))
def test_it_does_not_depend_on_the_block_size(ids: list[int], size: int, other: int) -> None:
    digest = PromptDigest(ids)
    by_size = dict(zip(digest.boundaries(size, len(ids)),
                       digest.at(digest.boundaries(size, len(ids))), strict=True))  # fmt: skip
    by_other = dict(zip(digest.boundaries(other, len(ids)),
                        digest.at(digest.boundaries(other, len(ids))), strict=True))  # fmt: skip
    for position in by_size.keys() & by_other.keys():
        assert by_size[position] == by_other[position]


@pytest.mark.parametrize(
    ("length", "positions"), [(0, [0]), (5, [5]), (16, [16]), (40, [16, 32, 40]), (32, [16, 32])]
)
def test_boundaries(length: int, positions: list[int]) -> None:
    assert PromptDigest([1] * length).boundaries(16, length) == positions


@pytest.mark.parametrize(
    "parts",
    [
        {"lora": "a"},
        {"cache_salt": "a"},
        {"lora": "a", "cache_salt": "b"},
        {"lora": "ab"},
        {"mm_items": [(3, "a")]},
        {"mm_items": [(4, "a")]},
        {"mm_items": [(3, "b")]},
        {"mm_items": [(3, "a"), (4, "b")]},
        {"mm_items": [(3, "ab")]},
    ],
)
def test_everything_that_changes_kv_changes_it(parts: dict[str, object]) -> None:
    others: list[dict[str, object]] = [
        {},
        {"lora": "b", "cache_salt": "a"},
        {"mm_items": [(3, "a"), (3, "b")]},
    ]
    mine = one(list(range(8)), 8, **parts)
    assert len(mine) == DIGEST_SIZE
    assert all(one(list(range(8)), 8, **other) != mine for other in others)


def test_an_image_counts_from_where_it_begins() -> None:
    ids = list(range(8))
    plain, image = PromptDigest(ids), PromptDigest(ids, mm_items=[(3, "img")])
    assert plain.at([0, 1, 3]) == image.at([0, 1, 3])
    assert not set(plain.at([4, 5, 8])) & set(image.at([4, 5, 8]))


@given(
    tokens.filter(bool), st.lists(st.tuples(st.integers(0, 70), st.text(max_size=3)), max_size=4)
)
def test_all_at_once_is_as_one_by_one(ids: list[int], items: list[tuple[int, str]]) -> None:
    digest = PromptDigest(ids, mm_items=items)
    positions = range(len(ids) + 1)
    assert digest.at(positions) == [digest.at([p])[0] for p in positions]


def test_wrong_use_is_told() -> None:
    with pytest.raises(ValueError, match="negative"):
        PromptDigest([1, -1])
    with pytest.raises(ValueError, match="position 3"):
        PromptDigest([1, 2]).at([3])
    with pytest.raises(ValueError, match="position 1 after 2"):
        PromptDigest([1, 2]).at([2, 1])
