"""The glossary and the table of models: definitions in words, numbers from the presets."""

from pieces import table

from mla.cost import cache_bytes_per_token, kv_bytes_per_token
from mla.presets import ALIASES, PRESETS, preset

SHOWN = ("deepseek-v3", "deepseek-v2-lite", "toy")
AXES = {
    "T": ("new tokens of a step, packed over its requests", None),
    "S": ("cached tokens of a request, the new ones included", None),
    "B": ("requests of a step", None),
    "N": ("query heads (`num_attention_heads`)", "N"),
    "H": ("hidden size (`hidden_size`)", "H"),
    "Lq": ("query rank, the width of the query latent (`q_lora_rank`); none: the query has no latent", "Lq"),
    "L": ("KV rank, the width of the latent (`kv_lora_rank`)", "L"),
    "P": ("content part of a head's query and key, without position (`qk_nope_head_dim`)", "P"),
    "R": ("position part, which is rotated; its key is shared by all heads (`qk_rope_head_dim`)", "R"),
    "V": ("value of a head (`v_head_dim`)", "V"),
}
Entry = tuple[str, str, str]  # term, shape or unit, meaning
TENSORS: tuple[Entry, ...] = (
    ("hidden", "(T, H)", "what the layer gets; h in the paper"),
    ("q_c", "(T, Lq)", "query latent, after its RMSNorm; c^Q"),
    ("q_nope", "(T, N, P)", "content part of the query; q^C"),
    ("q_pe", "(T, N, R)", "position part of the query, rotated; q^R"),
    ("q_latent", "(T, N, L)", "absorbed query: q_nope multiplied by W_UK"),
    ("kv_c", "(S, L)", "KV latent, after its RMSNorm: cached; c^KV"),
    ("k_pe", "(S, R)", "position key that all heads share, rotated: cached; k^R"),
    ("k_nope", "(S, N, P)", "expanded content keys, kv_c multiplied by W_UK; k^C"),
    ("v", "(S, N, V)", "expanded values, kv_c multiplied by W_UV; v^C"),
    ("out", "(T, N, V)", "attention's output for each head, before W_O"),
    ("lse", "(T, N)", "natural logarithm of the softmax denominator, softmax scale included"),
)
WEIGHTS: tuple[Entry, ...] = (
    ("W_DQ", "(H, Lq)", "down-projection of the query; `q_a_proj`"),
    (
        "W_UQ",
        "(Lq, N, P)",
        "query latent to content part; `q_b_proj`, the first P rows of a head (`q_proj` without Lq)",
    ),
    ("W_QR", "(Lq, N, R)", "query latent to position part; `q_b_proj`, the last R rows of a head"),
    ("W_DKV", "(H, L)", "down-projection to the latent; `kv_a_proj_with_mqa`, the first L rows"),
    ("W_KR", "(H, R)", "to the position key; `kv_a_proj_with_mqa`, the last R rows"),
    ("W_UK", "(L, N, P)", "latent to content keys; `kv_b_proj`, the first P rows of a head"),
    ("W_UV", "(L, N, V)", "latent to values; `kv_b_proj`, the last V rows of a head"),
    ("W_O", "(N, V, H)", "output projection; `o_proj`"),
    ("q_norm, kv_norm", "(Lq,), (L,)", "weights of the two RMSNorms; `q_a_layernorm`, `kv_a_layernorm`"),
)
IDEAS: tuple[Entry, ...] = (
    ("latent", "L numbers", "what is kept of a token in place of keys and values for every head"),
    ("latent row", "L + R numbers", "latent and rotated position key, side by side: all that is cached of a token"),
    ("expanded form", "`mha_form`", "make keys and values of every head from the latents, then multi-head attention"),
    (
        "absorbed form",
        "`mqa_form`",
        "W_UK goes into the query, W_UV behind the output: attention over the latent rows, which all heads share",
    ),
    ("softmax scale", "float", "(P + R)^-0.5, with YaRN times m²: `MLAConfig.softmax_scale`, and never from L + R"),
    (
        "decoupled RoPE",
        "",
        "position in R dimensions of their own, because a rotation between W_UK and the query would forbid absorbing",
    ),
    (
        "YaRN",
        "",
        "stretching of the rotation's wavelengths to longer contexts; with DeepSeek it scales the softmax too",
    ),
    (
        "mscale",
        "float",
        "coefficient a of YaRN's m(f, a) = 0.1 a ln f + 1; `mscale_all_dim` is the one that reaches the softmax",
    ),
    (
        "interleaved",
        "bool",
        "whether rotation turns the pairs (2i, 2i+1), as DeepSeek's weights expect, or (i, i + R/2)",
    ),
    ("tier", "", "one way to compute attention, behind the contract"),
    ("Need", "", "what a layer asks of a tier, fixed for its life"),
    ("refusal", "", "the sentences with which a tier says no to a Need"),
    ("form", "`auto`, `mha`, `mqa`", "which of the two a tier takes; `auto` chooses for each request"),
    ("plan", "", "decisions of one step that all layers share, with the scratch memory"),
    ("prefill, decode", "", "many new tokens of a request at once, or one"),
    ("chunked prefill", "", "a long prompt in several steps; the result does not depend on the cuts"),
    (
        "workspace",
        "rows",
        "cached rows that are gathered or expanded at once, so that memory does not grow with the context",
    ),
    ("state", "(out, lse)", "attention over some of the keys; two of them over disjoint keys merge into one"),
    ("merge", "", "the one way to combine two states: weights exp(lse - max)"),
    ("split", "", "a part of a request's keys that one program of a GPU kernel takes; merged afterwards"),
)
PAGING: tuple[Entry, ...] = (
    ("page", "page_size rows", "the unit in which cache memory is given out"),
    ("page_size", "rows", "tokens in a page"),
    ("block_table", "(B, max_pages)", "pages of each request, in order; entries past its last page may hold anything"),
    ("slot", "int64", "where a row lies: page · page_size + place in the page"),
    ("slot_mapping", "(T,)", "slot that each new row is written to; -1: it is not written"),
    ("query_start_loc", "(B+1,)", "where each request's rows begin among the T rows"),
    ("seq_lens", "(B,)", "keys of each request, new tokens included"),
    ("row_kv_lens", "(T,)", "keys that each row sees: the mask, and the only one; 0 marks an empty row"),
    ("empty row", "", "a row without keys: output exactly 0, LSE -inf"),
    ("bottom-right", "", "the causal mask in which the last new token of a request sees all its keys"),
    ("batch grammar", "16q1s4k", "16 requests of 1 new token over 4096 keys each; parts are joined by _"),
)
JUDGING: tuple[Entry, ...] = (
    ("oracle", "float64", "attention by definition: quadratic, no cache, no absorption, no code of ours"),
    ("unit roundoff u", "", "largest relative error of one rounding: 2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32"),
    ("replica", "", "an oracle run whose intermediates are rounded up or down at random, as a kernel must store them"),
    ("budget", "", "the error that honest rounding explains on exactly this case, times a small factor"),
    ("error/budget", "", "1 is the limit; a right kernel uses a part of it"),
    ("family", "randn, needle, ...", "how the inputs of a case are made"),
    ("needle", "", "one key that outweighs all others and must be found"),
    ("poison", "NaN", "what fills memory that a tier must not read"),
    ("planted fault", "", "a right kernel with one mistake; the suite must reject it"),
    ("attend, latent", "levels", "a whole tier, or its inner kernel from absorbed query to latent output"),
)
COSTS: tuple[Entry, ...] = (
    ("FLOP", "", "a multiplication or an addition; a multiply-add is 2"),
    ("intensity", "FLOP/byte", "work for each byte that has to pass through memory"),
    ("ridge", "FLOP/byte", "intensity at which a machine's two ceilings meet"),
    ("roofline", "seconds", "the larger of FLOPs / peak and bytes / bandwidth: no kernel can be faster"),
    ("break-even", "query tokens", "new tokens of a request from which on the expanded form does less work"),
)
SECTIONS = (
    ("Tensors", TENSORS, "shape"), ("Weights", WEIGHTS, "shape"), ("Ideas", IDEAS, "unit or value"),
    ("Batches and pages", PAGING, "shape or unit"), ("Judging", JUDGING, "value"), ("Costs", COSTS, "unit"),
)  # fmt: skip


def slug(term: str) -> str:
    """Return the anchor of a term: capitals and small letters are told apart, as the symbols are."""
    return "".join(c if c.isalnum() or c == "_" else "-" for c in term)


def anchored(term: str) -> str:
    """Return a term with its anchor."""
    return f'<span id="{slug(term)}">**{term}**</span>'


def glossary() -> str:
    """Return reference/glossary.md."""
    value = lambda name, field: getattr(preset(name), field) if field else None
    rows = [
        (
            anchored(axis),
            about,
            *("" if field is None else "none" if value(n, field) is None else value(n, field) for n in SHOWN),
        )
        for axis, (about, field) in AXES.items()
    ]
    text = (
        "# Glossary\n\nEvery symbol of code, papers and pages. In colours: "
        '<span class="latent">latent</span>, <span class="rope">position</span>, '
        '<span class="per-head">per head</span>, <span class="query">query</span>, <span '
        'class="error">error</span>.\n\n'
        "## Axis letters\n\n" + table(("letter", "what it counts", *SHOWN), rows)
    )
    for title, entries, unit in SECTIONS:
        text += f"\n## {title}\n\n" + table(
            ("term", unit, "meaning"), [(anchored(t), shape, about) for t, shape, about in entries]
        )
    return text


def models() -> str:
    """Return reference/models.md."""
    rows, notes = [], []
    for name in PRESETS:
        c = preset(name)
        layers = c.num_hidden_layers
        row = cache_bytes_per_token(c)
        mha = kv_bytes_per_token(c, c.N)
        number = ""
        if c.unsupported:
            notes.append((name, c.unsupported))
            number = "see below"
        rows.append((
            f"`{name}`", c.N, c.H, c.Lq or "none", c.L, c.P, c.R, c.V, layers if layers > 1 else "not known",
            f"{c.softmax_scale:.5f}", row, f"{mha / row:.1f}", number or "yes",
        ))  # fmt: skip
    head = (
        "preset", "N", "H", "Lq", "L", "P", "R", "V", "layers", "softmax scale", "bytes a token and layer",
        "as keys and values, times", "computed here",
    )  # fmt: skip
    aliases = ", ".join(f"`{a}` is `{b}`" for a, b in ALIASES.items())
    said = "\n".join(f"- `{name}`: {'; '.join(sentences)}" for name, sentences in notes)
    return (
        "---\nhide: [toc]\n---\n\n# Models\n\n"
        "Sizes of released models, from `mla/presets.py`; any of these names is a value of `--model`. Bytes are "
        "those of a "
        "bfloat16 cache. The last number but one says how much larger keys and values of all heads would be: what "
        "a cache "
        "holds that materialises them.\n\n"
        + table(head, rows)
        + f"\nOther names: {aliases}.\n\n## What is not computed\n\n"
        "These have a feature beyond plain MLA. They load, and `require_supported` refuses to run them:\n\n"
        + said
        + "\n"
    )


def pages() -> dict[str, str]:
    """Return both pages."""
    return {"reference/glossary.md": glossary(), "reference/models.md": models()}
