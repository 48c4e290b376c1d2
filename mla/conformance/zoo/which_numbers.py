"""Edits of `zoo/kernel.py` by which the right keys give wrong numbers: scale, rope, merge, LSE, heads, values, bits.

The form of the text is that of `zoo/edits.py`.
"""

TEXT = r"""
scale_of_the_latent_width (scale, golden constant): The scale is (L + R)^-0.5, of the widths in the cache.
- * need.softmax_scale
+ * (L + need.R) ** -0.5

scale_without_mscale (scale, golden constant): The scale is (P + R)^-0.5, without YaRN's term.
- * need.softmax_scale
+ * (need.P + need.R) ** -0.5

scale_mscale_once (scale, golden constant): YaRN's m multiplies the scale once instead of squared.
- * need.softmax_scale
+ * (need.softmax_scale * (need.P + need.R) ** -0.5) ** 0.5

scale_mscale_inverted (scale, golden constant): The scale is divided by YaRN's m^2.
- * need.softmax_scale
+ / (need.softmax_scale * (need.P + need.R))

scale_one_percent (scale, golden constant): The scale is 1 % too large.
- * need.softmax_scale
+ * need.softmax_scale * 1.01

scale_twice (scale): The query was scaled before and the scores are scaled again.
- * need.softmax_scale
+ * need.softmax_scale**2

scale_divides (scale, D5): Scores are divided by the scale, not multiplied with it.
- * need.softmax_scale
+ / need.softmax_scale

scale_log2e_kept (scale, B1): Scores are scaled by log2(e) for exp2, but exp is taken.
- * need.softmax_scale
+ * need.softmax_scale * 1.4426950408889634

rope_dropped (rope, D1): The position part of the score is missing.
- torch.cat([q_latent, q_pe], dim=-1)
+ torch.cat([q_latent, q_pe * 0], dim=-1)

rope_from_the_front (rope, E4): Keys are read as [k_pe, kv_c], so that query and key parts do not meet.
- cache.layout.read(cache.data[page, offset])
+ cache.layout.read(cache.data[page, offset])[::-1]

rope_halves_swapped (rope, E1): The query's position part is in another order of its halves than the key's.
- torch.cat([q_latent, q_pe], dim=-1)
+ torch.cat([q_latent, q_pe.roll(q_pe.shape[-1] // 2, -1)], dim=-1)

rope_negated (rope): The position part of the score is subtracted.
- torch.cat([q_latent, q_pe], dim=-1)
+ torch.cat([q_latent, -q_pe], dim=-1)

merge_without_rescale (merge, A1): The running sums are not rescaled when the maximum grows.
- shrink = torch.exp(top - base)
+ shrink = torch.ones_like(base)

merge_total_not_rescaled (merge, A1): The running denominator is not rescaled, the output is.
- total = total * shrink + weights.sum(dim=-1)
+ total = total + weights.sum(dim=-1)

merge_output_not_rescaled (merge, A1): The running output is not rescaled, the denominator is.
- acc = acc * shrink[:, None] + weights @ keys[:, :L]
+ acc = acc + weights @ keys[:, :L]

merge_unweighted (merge, golden constant): Partial outputs are averaged, not weighted by their LSE.
- (share[..., None] * part_out).sum(dim=0) / total[:, None], 0)
+ ((part_lse > -INF)[..., None] * part_out).sum(dim=0) / (part_lse > -INF).sum(dim=0)[:, None], 0)

merge_natural_as_base_2 (merge, golden constant): Natural partial LSEs are read as base 2.
- share = torch.exp(part_lse - base)
+ share = torch.exp2(part_lse - base)

merge_base_2_as_natural (merge, golden constant): Partial LSEs are of base 2 and combined as natural ones.
- return out, top + total.log()
+ return out, (top + total.log()) / 0.6931471805599453

merge_by_maximum (merge, A5): Partial outputs are weighted by their largest score, not by their LSE.
- return out, top + total.log()
+ return out, top

merge_unnormalised (merge, A1): Partial outputs are combined before they are divided by their denominators.
- out = torch.where(total[:, None] > 0, acc / total[:, None], 0)
+ out = torch.where(total[:, None] > 0, acc, 0)

lse_base_2 (lse, B1): The LSE is in base 2.
- return out, base + total.log()
+ return out, (base + total.log()) / 0.6931471805599453

lse_base_2_for_decode (lse, B4): The LSE is in base 2 for requests of one new token.
- lse[first:last] = merged_lse.view(-1, heads)[:, :N]
+ lse[first:last] = merged_lse.view(-1, heads)[:, :N] / (0.6931471805599453 if last - first == 1 else 1)

lse_without_the_maximum (lse, A12): The LSE lacks the maximum that was subtracted.
- return out, base + total.log()
+ return out, total.log()

lse_is_the_maximum (lse, A12): The LSE is the largest partial one.
- return out, base + total.log()
+ return out, top

lse_of_the_first_range (lse, A12): The LSE is that of the first range, right only where there is one.
- return out, base + total.log()
+ return out, part_lse[0]

lse_without_scale (lse, B3): The LSE is divided by the softmax scale.
- lse[first:last] = merged_lse.view(-1, heads)[:, :N]
+ lse[first:last] = merged_lse.view(-1, heads)[:, :N] / need.softmax_scale

lse_transposed_when_square (lse, U3): The LSE comes as (N, T), which a shape check lets pass where T == N.
- return AttentionState(out, lse)
+ return AttentionState(out, lse.T.contiguous() if T == N else lse)

lse_layout_heads_first (lse, U3): The LSE is laid out as (N, T) in memory of (T, N).
- return AttentionState(out, lse)
+ return AttentionState(out, lse.T.reshape(T, N))

lse_of_the_next_head (lse, I1): The LSE of head h is that of head h + 1.
- lse[first:last] = merged_lse.view(-1, heads)[:, :N]
+ lse[first:last] = merged_lse.view(-1, heads)[:, :N].roll(-1, 1)

empty_plus_infinity (empty, C9): Rows without keys have an LSE of +inf.
- return AttentionState(out, lse)
+ return AttentionState(out, lse.masked_fill(lse == -INF, INF))

empty_lse_zero (empty, C1): Rows without keys have an LSE of 0.
- return AttentionState(out, lse)
+ return AttentionState(out, lse.masked_fill(lse == -INF, 0.0))

empty_divides_by_zero (empty, C2): Rows without keys are 0 / 0 where partial results are combined.
- out = torch.where(total[:, None] > 0, (share[..., None] * part_out).sum(dim=0) / total[:, None], 0)
+ out = (share[..., None] * part_out).sum(dim=0) / total[:, None]

empty_minus_infinity_from_itself (empty, C8): A tile or range without visible keys is -inf - -inf.
- base = peak.masked_fill(peak == -INF, 0.0)
+ base = peak

empty_sees_one_key (empty, C1): Rows without keys see the first key of their request.
- batch.row_kv_lens[first:last].repeat_interleave(heads)
+ batch.row_kv_lens[first:last].clamp(min=1).repeat_interleave(heads)

empty_range_divides_by_zero (empty, C2): A range in which a row sees no key gives 0 / 0, and 0 * NaN is NaN.
- out = torch.where(total[:, None] > 0, acc / total[:, None], 0)
+ out = acc / total[:, None]

empty_requests_shorten_the_loop (empty, A2): As many requests are served as have keys, empty ones among them.
- for b in range(batch.num_requests):
+ for b in range(int((batch.seq_lens > 0).sum())):

head_off_by_one (head, I1): The output of head h goes to head h + 1.
- out[first:last] = merged_out.view(-1, heads, L)[:, :N]
+ out[first:last] = merged_out.view(-1, heads, L)[:, :N].roll(1, 1)

head_unpadded_in_the_wrong_order (head, I1): Padded heads are cut off as if heads came before tokens.
- out[first:last] = merged_out.view(-1, heads, L)[:, :N]
+ out[first:last] = merged_out.view(heads, -1, L)[:N].transpose(0, 1)

head_cut_before_unpadding (head, I1): The first new tokens x N rows are kept, padded heads among them.
- out[first:last] = merged_out.view(-1, heads, L)[:, :N]
+ out[first:last] = merged_out[: (last - first) * N].view(-1, N, L)

head_query_off_by_one (head, I1): Head h takes the query of head h - 1.
- query = pad(torch.cat([q_latent, q_pe], dim=-1)
+ query = pad(torch.cat([q_latent, q_pe], dim=-1).roll(1, 1)

head_last_dropped (head, I1): The last head is left at zero.
- out[first:last] = merged_out.view(-1, heads, L)[:, :N]
+ out[first:last, : N - 1] = merged_out.view(-1, heads, L)[:, : N - 1]

head_block_repeated (head, I1): Heads past the first block repeat it.
- query = pad(torch.cat([q_latent, q_pe], dim=-1)
+ query = pad(torch.cat([q_latent, q_pe], dim=-1)[:, torch.arange(N) % HEAD_BLOCK]

head_query_strides (head, F4): The absorbed query is read as if its heads lay side by side.
- torch.cat([q_latent, q_pe], dim=-1)
+ torch.cat([q_latent.as_strided(q_latent.shape, (N * L, L, 1)), q_pe], dim=-1)

value_wrong_columns (value, E4): Values are the last L columns of a row, not the first.
- weights @ keys[:, :L]
+ weights @ keys[:, -L:]

value_of_the_next_key (value, H6): Weights meet the values of the next row of the tile.
- weights @ keys[:, :L]
+ weights @ keys[:, :L].roll(-1, 0)

value_columns_rotated (value, E4): Values begin R columns late and end with the row's first.
- weights @ keys[:, :L]
+ weights @ keys.roll(-1, 1)[:, :L]

precision_scores_in_16_bits (precision, P9): Scores are rounded to bfloat16 before the softmax.
- scores = query @ keys.T * need.softmax_scale
+ scores = (query @ keys.T * need.softmax_scale).bfloat16().to(query.dtype)

precision_accumulator_in_16_bits (precision, A1): The running output is kept in bfloat16.
- acc = acc * shrink[:, None] + weights @ keys[:, :L]
+ acc = (acc * shrink[:, None] + weights @ keys[:, :L]).bfloat16().to(acc.dtype)

precision_denominator_in_16_bits (precision, A1): The running denominator is kept in bfloat16.
- total = total * shrink + weights.sum(dim=-1)
+ total = (total * shrink + weights.sum(dim=-1)).bfloat16().to(total.dtype)

precision_no_maximum (precision, P9): exp is taken of scores as they are, which overflows.
- base = peak.masked_fill(peak == -INF, 0.0)
+ base = torch.zeros_like(peak)

precision_weights_in_8_bits (precision, L6): Probabilities are rounded to 8-bit floats.
- weights @ keys[:, :L]
+ weights.to(torch.float8_e4m3fn).to(keys.dtype) @ keys[:, :L]

precision_lse_in_16_bits (precision, A12): The LSE is rounded to bfloat16.
- return out, base + total.log()
+ return out, (base + total.log()).bfloat16().to(base.dtype)

precision_query_in_8_bits (precision, L6): The query is rounded to 8-bit floats.
- rows = query[first:last].flatten(0, 1)
+ rows = query[first:last].flatten(0, 1).to(torch.float8_e4m3fn).to(wide)

precision_weights_overflow (precision, P9): Probabilities times 2^16 are cast to float16, whose largest is 65504.
- weights @ keys[:, :L]
+ (weights * 65536).half().to(keys.dtype) / 65536 @ keys[:, :L]
"""
