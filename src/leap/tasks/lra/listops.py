"""ListOps: nested lists of digits under four operators; which digit is the value of the whole?

    [MAX 4 [MIN 2 3 ] 1 [MED 1 5 8 9 2 ] ]  is  5

By the rule of Long Range Arena: at depths 1 to 9 a node is an operator with probability 1/4, and
has 2 to 10 arguments; else, and always at depth 10, it is a digit. Trees of more than 500 and fewer
than 2,000 tokens are kept, an operator and its closing bracket counting one each; easier levels,
which are ours, are of shorter ones. MED is the median, rounded down; SM the sum modulo 10.

Trees are grown by the thousand, a depth at a time. Those that get too long are dropped at once,
and tokens and values are worked out for those alone that are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, UInt8

from leap.tasks.lra.cache import SPLITS, Collector, Examples, Sequences
from leap.tasks.lra.sources import RELEASE, broken, check_count, find_file, read_table

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = (*"0123456789", *OPERATORS, "]")
"""The 15 kinds of token; on disk a token is its number in this list."""
MIN, MAX, MED, SM, CLOSE = range(10, 15)

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
P_OPERATOR = 0.25
LENGTHS = {"easy": (16, 128), "intermediate": (128, 500), "hard": (500, 2000)}
"""Of each level; neither of the two is a length that is kept."""
AT_ONCE = 2048
"""Trees that grow at a time."""
FILES = dict(zip(SPLITS, ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"), strict=True))
"""Names of the files in Long Range Arena's release."""
SIZES = dict(zip(SPLITS, (96_000, 2_000, 2_000), strict=True))
"""Examples in each of them."""


def evaluate(tokens: Sequence[int] | UInt8[np.ndarray, " t"]) -> int:
    """The value of an expression, a token at a time: what the fast version is tested against."""
    open_lists: list[list[int]] = [[]]
    for token in map(int, tokens):
        if token != CLOSE:
            open_lists[-1].append(token)
            if token >= MIN:
                open_lists.append([])
            continue
        arguments = sorted(open_lists.pop())
        n = len(arguments)
        operator = open_lists[-1].pop()
        value = {
            MIN: arguments[0],
            MAX: arguments[-1],
            MED: (arguments[(n - 1) // 2] + arguments[n // 2]) // 2,
            SM: sum(arguments) % 10,
        }[operator]
        open_lists[-1].append(value)
    ((value,),) = open_lists
    return value


def make_examples(
    count: int,
    chance: np.random.Generator,
    *,
    max_depth: int = MAX_DEPTH,
    lengths: tuple[int, int] = LENGTHS["hard"],
) -> Examples:
    """Make expressions and their values. Each is drawn anew, so there can be repeats."""
    sequences: list[UInt8[np.ndarray, " t"]] = []
    labels: list[UInt8[np.ndarray, " n"]] = []
    while len(sequences) < count:
        made = _spell(_grow(AT_ONCE, max_depth, lengths, chance), chance)
        sequences.extend(made.inputs[i] for i in range(len(made)))
        labels.append(made.labels)
    return Examples(Sequences.join(sequences[:count]), np.concatenate(labels)[:count])


@dataclass(frozen=True)
class _Depth:
    """The nodes of many trees at one depth, in order: children of one node stand together."""

    tree: Int[np.ndarray, " n"]
    """Which tree a node is in."""
    arguments: Int[np.ndarray, " n"]
    """Arguments of an operator; 0 for a digit."""

    def keep(self, trees: Bool[np.ndarray, " t"]) -> "_Depth":
        """Drop the nodes of all other trees."""
        kept = trees[self.tree]
        return _Depth(self.tree[kept], self.arguments[kept])


def _grow(
    count: int, max_depth: int, lengths: tuple[int, int], chance: np.random.Generator
) -> list[_Depth]:
    """Begin `count` trees, each with an operator, and return those of a length to keep."""
    shortest, longest = lengths
    most = MAX_ARGUMENTS + 1
    depths = [_Depth(np.arange(count), chance.integers(2, most, count))]
    n_tokens = np.full(count, 2)
    for depth in range(2, max_depth + 1):
        above = depths[-1]
        tree = np.repeat(above.tree, above.arguments)
        arguments = np.zeros(len(tree), np.int64)
        if depth < max_depth:
            operator = chance.random(len(tree)) <= P_OPERATOR
            arguments[operator] = chance.integers(2, most, operator.sum())
        n_tokens += np.bincount(tree, 1 + (arguments > 0), count).astype(np.int64)
        # What is still to come has a token for each argument at the least.
        at_least = n_tokens + np.bincount(tree, arguments, count).astype(np.int64)
        depths.append(_Depth(tree, arguments).keep(at_least < longest))
        n_tokens[at_least >= longest] = longest
    kept = (n_tokens > shortest) & (n_tokens < longest)
    return [depth.keep(kept) for depth in depths]


def _spell(depths: list[_Depth], chance: np.random.Generator) -> Examples:
    """Draw digits and operators for trees, and write them down as tokens and values."""
    kinds = [
        np.where(
            depth.arguments > 0,
            chance.integers(MIN, CLOSE, len(depth.tree)),
            chance.integers(0, 10, len(depth.tree)),
        )
        for depth in depths
    ]
    # From the leaves up: how many tokens a node has with all below it, and its value.
    n_tokens = [np.ones_like(kinds[-1])]
    values = kinds[-1]
    for depth, kind in zip(depths[-2::-1], kinds[-2::-1], strict=True):
        operator = depth.arguments > 0
        sizes = np.ones_like(kind)
        sizes[operator] = 2 + _sums(n_tokens[0], depth.arguments[operator])
        below, values = values, kind.copy()
        values[operator] = _apply(kind[operator], below, depth.arguments[operator])
        n_tokens.insert(0, sizes)

    # From the root down: where a node is written.
    offsets = np.concatenate([[0], n_tokens[0].cumsum()])
    tokens = np.zeros(offsets[-1], np.uint8)
    places = offsets[:-1]
    for i, (depth, kind, sizes) in enumerate(zip(depths, kinds, n_tokens, strict=True)):
        operator = depth.arguments > 0
        tokens[places] = kind
        tokens[(places + sizes - 1)[operator]] = CLOSE
        if i + 1 < len(depths):
            before = n_tokens[i + 1].cumsum() - n_tokens[i + 1]
            arguments = depth.arguments[operator]
            first = arguments.cumsum() - arguments
            shift = places[operator] + 1 - before[first]
            places = before + np.repeat(shift, arguments)
    return Examples(Sequences(tokens, offsets), values.astype(np.uint8))


def _sums(values: Int[np.ndarray, " m"], lengths: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Sums over neighbouring stretches of these lengths."""
    total = np.concatenate([[0], values.cumsum()])
    ends = lengths.cumsum()
    return total[ends] - total[ends - lengths]


def _apply(
    operators: Int[np.ndarray, " n"], values: Int[np.ndarray, " m"], n: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Values of operators, each with the next `n` of the values as its arguments."""
    row = np.repeat(np.arange(len(n)), n)
    column = np.arange(len(values)) - np.repeat(n.cumsum() - n, n)
    # Ten is more than any digit, so the arguments come first in their row.
    table = np.full((len(n), MAX_ARGUMENTS), 10)
    table[row, column] = values
    table.sort(axis=1)
    each = np.arange(len(n))
    results = {
        MIN: table[:, 0],
        MAX: table[each, n - 1],
        MED: (table[each, (n - 1) // 2] + table[each, n // 2]) // 2,
        SM: _sums(values, n) % 10,
    }
    return np.select([operators == operator for operator in results], list(results.values()))


def read(source: Path, max_length: int) -> dict[str, Examples]:
    """Read the expressions of Long Range Arena's release, from its folder or one above it."""
    found = {}
    for split, name in FILES.items():
        path = find_file(source, name)
        found[split] = read_tsv(path, max_length)
        check_count(path, len(found[split]), SIZES[split], RELEASE)
    return found


def read_tsv(path: Path, max_length: int) -> Examples:
    """Read one file of the release. Parentheses add nothing, and are dropped."""
    number = {name.encode(): i for i, name in enumerate(VOCABULARY)}
    found = Collector(max_length)
    for i, line in enumerate(read_table(path)):
        source, _, target = line.partition(b"\t")
        if i == 0 and source == b"Source":
            continue
        try:
            tokens = bytes(number[token] for token in source.translate(None, b"()").split())
            label = range(MIN).index(number[target])
        except (KeyError, ValueError):
            tokens = b""
        if not tokens or sum(map(tokens.count, range(MIN, CLOSE))) != tokens.count(CLOSE):
            raise broken(path, f"line {i + 1} is no expression with its value")
        found.add(label, tokens)
    if not found:
        raise broken(path, "it holds no expressions")
    return found.examples()
