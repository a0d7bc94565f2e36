"""EM for additive codebooks whose codewords are c_A + i c_B (see `commvq`).

A stage is a mixture of K * K Gaussians whose centres are tied by 2 K complex vectors that are only
K. E: each vector belongs to all centres by exp(-distance^2 / 2 variance), the variance falling from
step to step, at last to the nearest alone. Since |z - c_A - i c_B|^2 has no term in which z, A and
B all occur, the weights factor and no array of size n K K is made. (The authors' code takes the
distance in place of its square, which does not factor, at falling temperatures.) M: with u_k =
[A = k] + i [B = k], the c that minimize E |z - u c|^2 solve E[u* u] c = E[u* z], a K x K system for
all pairs at once.
"""

import numpy as np

from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

SOFT_STEPS, HARD_STEPS = 10, 4
HOT, COLD = 1.0, 0.1  # variance of the mixture, in that of the vectors
REFITS = 2
_STAGE_RIDGE = 1e-3  # in vectors: keeps entries that nothing chose at 0
_REFIT_RIDGE = 0.1  # in vectors per entry: holds back what the sample does not show
_VANISHED = 1e-200
_BLOCK = 1024  # vectors whose candidates are held at once, in the rare case that needs it
_CANDIDATES = 1 << 16  # numbers that stay in a processor's cache


class Beam:
    """The best partial codes of each vector z complex [n, P], extended stage by stage.

    What remains of them is `rest` [n, W, P], its square `error` [n, W], their `path` uint8
    [n, W, 2 * stages]; all W of a vector differ.
    """

    def __init__(self, z: Array, width: int) -> None:
        self.width = width
        self.rest = z[:, None, :]
        self.error = np.square(np.abs(z)).sum(axis=1)[:, None]
        self.path = np.zeros((len(z), 1, 0), np.uint8)

    def extend(self, c: Array) -> None:
        """Add a stage with codebook [K, P] to all partial codes and keep the best ones."""
        k, n = len(c), len(self.rest)
        sizes = _sizes(c)
        keep = min(self.width, self.rest.shape[1] * k * k)
        rest = np.empty((n, keep, c.shape[1]), complex)
        error = np.empty((n, keep))
        path = np.empty((n, keep, self.path.shape[2] + 2), np.uint8)
        block = max(1, _CANDIDATES // (self.rest.shape[1] * k * k))
        space = np.empty((self.rest.shape[1], k, k, min(block, n)))
        for at in range(0, n, block):
            part = slice(at, at + block)
            inner = self.rest[part] @ c.conj().T
            # What each candidate (parent, A, B) would leave; vectors last, so that loops are long.
            turned = np.ascontiguousarray(inner.transpose(1, 2, 0))
            first = self.error[part].T[:, None] - 2 * turned.real
            grown = space[..., : len(inner)]
            np.add(first[:, :, None], sizes[:, :, None], out=grown)
            grown += (-2 * turned.imag)[:, None]
            code, error[part] = _least(grown.reshape(-1, k, len(inner)), keep)
            parent, code = np.divmod(code, k * k)
            own = np.arange(len(inner))[:, None]
            rest[part] = self.rest[part][own, parent]
            rest[part] -= c[code // k] + 1j * c[code % k]
            path[part, :, :-2] = self.path[part][own, parent]
            path[part, :, -2], path[part, :, -1] = code // k, code % k
        self.rest, self.error, self.path = rest, error, path

    def best(self) -> tuple[Array, Array]:
        """Codes uint8 [n, stages, 2] of least error, and what they leave, [n, P]."""
        rows, first = np.arange(len(self.rest)), self.error.argmin(axis=1)
        return self.path[rows, first].reshape(len(rows), -1, 2), self.rest[rows, first]


def _least(lines: Array, keep: int) -> tuple[Array, Array]:
    """Places [n, keep] of the least numbers in lines [R, K, n] laid end to end, and the numbers.

    They are in those lines whose own least are the `keep` least.
    """
    count, k, n = lines.shape
    own = np.arange(n)[:, None]
    lowest = lines.min(axis=1).T
    if keep == 1:
        line = lowest.argmin(axis=1)[:, None]
    elif keep < count:
        line = np.argpartition(lowest, keep - 1, axis=1)[:, :keep]
    else:
        line = np.broadcast_to(np.arange(count), (n, count))
    few = lines[line[:, :, None], np.arange(k), own[:, :, None]].reshape(n, -1)
    at = few.argmin(axis=1)[:, None] if keep == 1 else np.argpartition(few, keep - 1)[:, :keep]
    return line[own, at // k] * k + at % k, few[own, at]


def search(z: Array, books: Array, beam: int) -> tuple[Array, Array]:
    """Codes uint8 [n, M, 2] of vectors [n, P] for codebooks [M, K, P], and what they leave."""
    found = Beam(z, beam)
    for c in books:
        found.extend(c)
    return found.best()


def fit_codebooks(z: Array, stages: int, entries: int, seed: int, *, beam: int) -> Array:
    """Codebooks complex128 [M, K, P] for vectors z complex128 [n, P]; same bytes for same input.

    Raises CalibrationError for fewer vectors than K * K, or vectors that are not finite.
    """
    if len(z) < entries * entries:
        raise CalibrationError(
            f"codebooks of {entries} x {entries} codes need at least {entries**2} vectors, got "
            f"{len(z)}: calibrate on more tokens or take fewer entries"
        )
    if not np.all(np.isfinite(z)):
        raise CalibrationError("additive codebooks: the vectors hold NaN or infinity")
    rng = np.random.Generator(np.random.PCG64(seed))
    found = Beam(z, beam)
    books = np.empty((stages, entries, z.shape[1]), complex)
    for stage in range(stages):
        books[stage] = fit_stage(found.best()[1], entries, rng)
        found.extend(books[stage])
    codes, rest = found.best()
    for _ in range(REFITS):
        books = _refit(books, codes, rest)
        codes, rest = search(z, books, beam)
    return books


def fit_stage(z: Array, entries: int, rng: np.random.Generator) -> Array:
    """Codebook [K, P] of one stage by EM."""
    variance = float(np.square(np.abs(z)).mean() / 2)  # of one real coordinate
    c: Array = z[rng.choice(len(z), entries, replace=False)] * np.sqrt(0.5)
    for step in range(SOFT_STEPS + HARD_STEPS):
        if step < SOFT_STEPS and variance > 0:
            cooling = HOT * (COLD / HOT) ** (step / (SOFT_STEPS - 1))
            a, b, joint = _posterior(z, c, cooling * variance)
        else:
            codes = search(z, c[None], 1)[0][:, 0]
            a, b = np.eye(entries)[codes[:, 0]], np.eye(entries)[codes[:, 1]]
            joint = a.T @ b
        gram = np.diag(a.sum(axis=0) + b.sum(axis=0)) + 1j * (joint - joint.T)
        cross = (a - 1j * b).T @ z
        c = np.linalg.solve(gram + _STAGE_RIDGE * np.eye(entries), cross)
    return c


def _sizes(c: Array) -> Array:
    """|c_A + i c_B|^2 for all A and B, [K, K]."""
    size = np.square(np.abs(c)).sum(axis=1)
    sizes: Array = size[:, None] + size[None, :] - 2 * (c.conj() @ c.T).imag
    return sizes


def _posterior(z: Array, c: Array, variance: float) -> tuple[Array, Array, Array]:
    """Probabilities of A [n, K] and of B [n, K] for each vector, and the sum [K, K] of both."""
    inner = z @ c.conj().T / variance
    a = np.exp(inner.real - inner.real.max(axis=1, keepdims=True))
    b = np.exp(inner.imag - inner.imag.max(axis=1, keepdims=True))
    offset = -_sizes(c) / (2 * variance)
    prior = np.exp(offset - offset.max())
    total = (a * (b @ prior.T)).sum(axis=1, keepdims=True)
    # The best A and the best B may be a bad pair: where all weights vanish, do without factors.
    lost = np.flatnonzero(total[:, 0] < _VANISHED)
    total[lost], a[lost] = 1.0, 0.0
    a /= total
    p_a, p_b, joint = a * (b @ prior.T), b * (a @ prior), (a.T @ b) * prior
    for at in range(0, len(lost), _BLOCK):
        rows = lost[at : at + _BLOCK]
        w = inner.real[rows, :, None] + inner.imag[rows, None, :] + offset
        w = np.exp(w - w.max(axis=(1, 2), keepdims=True))
        w /= w.sum(axis=(1, 2), keepdims=True)
        p_a[rows], p_b[rows] = w.sum(axis=2), w.sum(axis=1)
        joint += w.sum(axis=0)
    return p_a, p_b, joint


def _refit(books: Array, codes: Array, rest: Array) -> Array:
    """All stages at once, for given codes: the ridge is on the change, so that order is kept."""
    stages, entries, _ = books.shape
    n, rows = len(codes), np.arange(len(codes))
    codes = codes.astype(np.int64)  # columns of u are beyond 255
    u = np.zeros((n, stages * entries), complex)
    for stage in range(stages):
        u[rows, stage * entries + codes[:, stage, 0]] += 1
        u[rows, stage * entries + codes[:, stage, 1]] += 1j
    gram = u.conj().T @ u
    gram += _REFIT_RIDGE * n / entries * np.eye(len(gram))
    refitted: Array = books + np.linalg.solve(gram, u.conj().T @ rest).reshape(books.shape)
    return refitted
