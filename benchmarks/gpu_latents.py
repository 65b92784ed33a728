"""Attention to latents, as `gpu.py` measures and checks it: to these as they are, and to what long rows expand them to. No GPU has
been asked yet."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from penstock.benchmarks.gpu_measure import replaced
from penstock.kernels import expanded, ragged
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.layout import AttentionLayout, Expansion, kind

DEEPSEEK = Expansion(heads=16, latent=512, plain=128, turned=64, values=128)  # V2 Lite's; V3's on 8 ranks
GLM = Expansion(heads=20, latent=512, plain=192, turned=64, values=256)  # 4.7 Flash's: what turns is multiplied with the rest
TINY = Expansion(heads=2, latent=48, plain=16, turned=8, values=16)


class Latents:
    """Rows, which have pages, over a cache of random latents."""

    def __init__(self, own: Expansion, rows: Sequence[Row], page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.own, self.rows, self.page_size, self.dtype, self.device = own, rows, page_size, dtype, device
        slots = (max(page for row in rows for page in row.pages) + 1) * page_size
        tokens = sum(row.queries for row in rows)
        self.cache = torch.randn(slots, 1, 1, own.latent + own.turned, device=device).to(dtype)
        self.query = torch.randn(tokens, own.heads, own.plain + own.turned, device=device).to(dtype)
        sizes = (own.heads, own.plain, own.latent), (own.heads, own.latent, own.values)
        self.to_keys, self.to_values = ((torch.randn(*size, device=device) * own.latent**-0.5).to(dtype) for size in sizes)
        self.how = AttentionOptions(0, (own.plain + own.turned) ** -0.5, latent=own.latent)

    def plan(self, fewest: int) -> tuple[list[int], ragged.Plan]:
        """The order of rows, of which those are expanded that have so many queries, whatever it costs."""
        own = self.own
        kinds = (kind(0, own.heads, 1, own.latent + own.turned, True),)
        layout = AttentionLayout(self.page_size, kinds, self.dtype, self.device, latent=own.latent, expansion=own)
        with ExitStack() as stack:
            stack.enter_context(replaced(expanded, "MIN_QUERIES_TRITON", fewest))
            stack.enter_context(replaced(expanded, "MARGIN", -1e9))
            order, plan = ragged.plan(self.rows, layout)
        return [*order], plan

    def found(self, plan: ragged.Plan) -> Tensor:
        """[tokens, heads, values], with all products that lead there from queries, and from latents."""
        return self._found(self.query, plan)

    def _found(self, query: Tensor, plan: ragged.Plan) -> Tensor:
        if isinstance(plan, expanded.Plan):
            long = ragged.attention_to_expanded(query[plan.first :], self.cache, plan, self.how, self.to_keys, self.to_values)
            return long if plan.others is None else torch.cat((self._found(query[: plan.first], plan.others), long))
        own = torch.bmm(query[..., : self.own.plain].transpose(0, 1), self.to_keys).transpose(0, 1)
        among = ragged.attention(torch.cat((own, query[..., self.own.plain :]), 2), self.cache, plan, self.how)
        return torch.bmm(among.transpose(0, 1), self.to_values).transpose(0, 1)

    def exact(self, order: Sequence[int]) -> Tensor:
        """In float64, of chains in that order."""
        answers, start = [], 0
        for row in (self.rows[i] for i in order):
            places = torch.arange(row.context + row.queries)
            slots = torch.tensor(row.pages)[places // self.page_size] * self.page_size + places % self.page_size
            cached = self.cache[slots.to(self.device)].double().flatten(1)
            answers.append(self._softmax(self.query[start : start + row.queries].double(), cached, row.context))
            start += row.queries
        return torch.cat(answers)

    def _softmax(self, query: Tensor, cached: Tensor, context: int) -> Tensor:
        latents, turned = cached[:, : self.own.latent], cached[:, self.own.latent :]
        keys = torch.einsum("kl,hpl->hkp", latents, self.to_keys.double())
        keys = torch.cat((keys, turned.expand(self.own.heads, -1, -1)), 2)
        logits = torch.einsum("qhp,hkp->hqk", query, keys) * self.how.scale
        hidden = torch.ones_like(logits[0], dtype=torch.bool).triu(context + 1)
        values = torch.einsum("kl,hlv->hkv", latents, self.to_values.double())
        return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)
