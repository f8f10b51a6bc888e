"""Constants from measurements: the non-negative ones whose relative errors are smallest.

Enters: rows of named terms with the time that was measured. Leaves: one constant per term. Always true: errors count
relative to the measurement and by their size, not their square, so a few broken rows don't bend the others; no constant
is negative; the same rows give the same constants. Next: `speed.py`.
"""

from collections.abc import Mapping, Sequence

ROUNDS, SWEEPS = 20, 120
SMALL_ERROR = 0.03
"""Below this an error counts as noise of the measurement."""


def fit_terms(rows: Sequence[Mapping[str, float]], measured: Sequence[float]) -> dict[str, float]:
    """Minimises sum |prediction / measured - 1| over constants >= 0: least squares with weights 1 / |error|, again and
    again (iteratively reweighted least squares; Lawson 1961), each by coordinate descent on the normal equations."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    scaled = [[row[name] / value for name in names] for row, value in zip(rows, measured, strict=True)]
    weights = [1.0] * len(scaled)
    found = [0.0] * len(names)
    for _ in range(ROUNDS):
        found = _solve(scaled, weights, found)
        errors = [abs(sum(c * x for c, x in zip(found, row, strict=True)) - 1) for row in scaled]
        weights = [1 / max(error, SMALL_ERROR) for error in errors]
    return {name: constant for name, constant in zip(names, found, strict=True) if constant > 0}


def _solve(rows: Sequence[Sequence[float]], weights: Sequence[float], start: Sequence[float]) -> list[float]:
    size = len(start)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, weight in zip(rows, weights, strict=True):
        for i in range(size):
            scaled = weight * row[i]
            if scaled:
                right[i] += scaled
                line = matrix[i]
                for j in range(i, size):
                    line[j] += scaled * row[j]
    for i in range(size):
        for j in range(i):
            matrix[i][j] = matrix[j][i]
    found = list(start)
    for _ in range(SWEEPS):
        for i in range(size):
            line = matrix[i]
            rest = right[i] - sum(line[j] * found[j] for j in range(size) if j != i)
            found[i] = max(0.0, rest / line[i])
    return found


def predicted(terms: Mapping[str, float], constants: Mapping[str, float]) -> float:
    """The sum of the terms, each times its constant."""
    return sum(constants.get(name, 0.0) * value for name, value in terms.items())
