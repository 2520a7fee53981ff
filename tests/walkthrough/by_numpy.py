"""The step of the ZeRO-1 walkthrough, recomputed with numpy only.

Each operation is in fp32 and its stored result in bf16: `bf16` marks each rounding of training in
bf16. Backward is written out by hand. Nothing here uses torch or zero_sim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WIDTH, HEADS, INNER, VOCABULARY, TOKENS = 4, 2, 16, 8, 3
SHAPES = {
    "ln1_weight": (WIDTH,),
    "ln1_bias": (WIDTH,),
    "W_q": (WIDTH, WIDTH),
    "W_k": (WIDTH, WIDTH),
    "W_v": (WIDTH, WIDTH),
    "W_o": (WIDTH, WIDTH),
    "ln2_weight": (WIDTH,),
    "ln2_bias": (WIDTH,),
    "W_1": (WIDTH, INNER),
    "b_1": (INNER,),
    "W_2": (INNER, WIDTH),
    "b_2": (WIDTH,),
    "W_vocab": (WIDTH, VOCABULARY),
}
LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
LAYER_NORM_EPS = 1e-5


def fp32(values):
    return np.asarray(values, dtype=np.float32)


def bf16(values):
    """Round to the nearest bf16, ties to even: the upper 16 bits of an fp32."""
    bits = fp32(values).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def exactly(values):
    """Keep everything in fp32, without rounding."""
    return fp32(values)


@dataclass
class Rank:
    """Forward and backward of one rank, by name."""

    inputs: np.ndarray
    targets: list
    params: dict
    stored: object = bf16
    activations: dict = field(default_factory=dict)
    grads: dict = field(default_factory=dict)
    probabilities: np.ndarray | None = None
    losses: np.ndarray | None = None

    def forward(self):
        p, act, stored = self.params, self.activations, self.stored
        act["norm 1"] = self.norm(self.inputs, "ln1")
        for name, weight in (("Q", "W_q"), ("K", "W_k"), ("V", "W_v")):
            act[name] = stored(act["norm 1"] @ p[weight])
        q, k, v = (by_heads(act[name]) for name in "QKV")
        act["scores"] = stored(stored(q @ k.transpose(0, 2, 1)) / np.float32(np.sqrt(2.0)))
        raised = np.exp(act["scores"] - act["scores"].max(-1, keepdims=True))
        act["softmax"] = stored(raised / raised.sum(-1, keepdims=True))
        act["mix"] = joined(stored(act["softmax"] @ v))
        act["W_o"] = stored(act["mix"] @ p["W_o"])
        act["residual 1"] = stored(self.inputs + act["W_o"])
        act["norm 2"] = self.norm(act["residual 1"], "ln2")
        act["inner"] = stored(stored(act["norm 2"] @ p["W_1"]) + p["b_1"])
        act["relu"] = np.maximum(act["inner"], np.float32(0))
        act["FFN"] = stored(stored(act["relu"] @ p["W_2"]) + p["b_2"])
        act["residual 2"] = stored(act["residual 1"] + act["FFN"])
        act["logits"] = stored(act["residual 2"] @ p["W_vocab"])
        raised = np.exp(act["logits"] - act["logits"].max(-1, keepdims=True))
        self.probabilities = raised / raised.sum(-1, keepdims=True)
        self.losses = -np.log(self.probabilities[np.arange(TOKENS), self.targets])
        return self

    def backward(self):
        p, act, grads, stored = self.params, self.activations, self.grads, self.stored
        wanted = np.eye(VOCABULARY, dtype=np.float32)[self.targets]
        back = stored((self.probabilities - wanted) / np.float32(TOKENS))
        grads["W_vocab"] = stored(act["residual 2"].T @ back)
        residual_2 = stored(back @ p["W_vocab"].T)

        grads["b_2"] = stored(residual_2.sum(0))
        grads["W_2"] = stored(act["relu"].T @ residual_2)
        back = stored(residual_2 @ p["W_2"].T) * (act["inner"] > 0)
        grads["b_1"] = stored(back.sum(0))
        grads["W_1"] = stored(act["norm 2"].T @ back)
        back = self.norm_back(stored(back @ p["W_1"].T), act["residual 1"], "ln2")
        residual_1 = stored(residual_2 + back)

        grads["W_o"] = stored(act["mix"].T @ residual_1)
        back = by_heads(stored(residual_1 @ p["W_o"].T))
        q, k, v = (by_heads(act[name]) for name in "QKV")
        weights = act["softmax"]
        of_v = stored(weights.transpose(0, 2, 1) @ back)
        of_weights = stored(back @ v.transpose(0, 2, 1))
        mean = (of_weights * weights).sum(-1, keepdims=True)
        of_scores = stored(stored((of_weights - mean) * weights) / np.float32(np.sqrt(2.0)))
        of_q = stored(of_scores @ k)
        of_k = stored(of_scores.transpose(0, 2, 1) @ q)
        back = fp32(np.zeros((TOKENS, WIDTH)))
        # Backward visits the last computed first.
        for name, own in (("W_v", of_v), ("W_k", of_k), ("W_q", of_q)):
            grads[name] = stored(act["norm 1"].T @ joined(own))
            back = stored(back + stored(joined(own) @ p[name].T))
        self.norm_back(back, self.inputs, "ln1")
        return self

    def norm(self, x, name):
        mean, root = statistics(x)
        normal = (x - mean) * root
        return self.stored(normal * self.params[f"{name}_weight"] + self.params[f"{name}_bias"])

    def norm_back(self, back, x, name):
        # Forward saves these in the dtype of its input.
        mean, root = (self.stored(each) for each in statistics(x))
        normal = (x - mean) * root
        self.grads[f"{name}_weight"] = self._token_by_token(back * normal)
        self.grads[f"{name}_bias"] = self._token_by_token(back)
        scaled = back * self.params[f"{name}_weight"]
        along = (scaled * normal).mean(-1, keepdims=True)
        return self.stored((scaled - scaled.mean(-1, keepdims=True) - normal * along) * root)

    def _token_by_token(self, terms):
        # torch's CPU kernel accumulates this sum in the params' dtype.
        total = np.zeros_like(terms[0])
        for term in terms:
            total = self.stored(total + term)
        return total


def statistics(x):
    """Return mean and inverse standard deviation of each row."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return mean, np.float32(1) / np.sqrt(variance + np.float32(LAYER_NORM_EPS))


def by_heads(x):
    """Reshape (tokens, width) to (heads, tokens, width of a head)."""
    return x.reshape(TOKENS, HEADS, -1).transpose(1, 0, 2)


def joined(x):
    """Reshape (heads, tokens, width of a head) to (tokens, width)."""
    return x.transpose(1, 0, 2).reshape(TOKENS, WIDTH)


def flat(by_name):
    """Join params or gradients in the order of the flat buffer."""
    return np.concatenate([by_name[name].reshape(-1) for name in SHAPES])


def adam(master, gradient):
    """Compute the first step of Adam (Kingma and Ba 2015, algorithm 1), in fp32.

    Returns:
        m, v, and the master after the step.
    """
    beta1, beta2 = BETAS
    m = np.float32(1 - beta1) * gradient
    v = np.float32(1 - beta2) * gradient * gradient
    m_hat, v_hat = m / np.float32(1 - beta1), v / np.float32(1 - beta2)
    return m, v, master - np.float32(LR) * m_hat / (np.sqrt(v_hat) + np.float32(EPS))
