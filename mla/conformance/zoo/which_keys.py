"""Edits of `zoo/kernel.py` by which wrong keys are read, twice or not at all: masks, tails, pages, splits, batches.

The form of the text is that of `zoo/edits.py`.
"""

TEXT = r"""
mask_top_left (mask, M3): Row i sees keys 0 .. i, as if there were no context.
- batch.row_kv_lens[first:last].repeat_interleave(heads)
+ (torch.arange(last - first) + 1).clamp(max=S).repeat_interleave(heads)

mask_missing (mask, golden constant): Every row of a request sees all its keys.
- visible = inside & (at < bound[:, None])
+ visible = inside & (bound[:, None] > 0)

mask_one_key_more (mask, M1): A row sees the key after its own.
- visible = inside & (at < bound[:, None])
+ visible = inside & (at <= bound[:, None]) & (bound[:, None] > 0)

mask_one_key_less (mask, M1): A row does not see its own key.
- visible = inside & (at < bound[:, None])
+ visible = inside & (at < bound[:, None] - 1)

mask_first_row_for_all (mask, M5): All rows of a request have the bound of its first row.
- batch.row_kv_lens[first:last].repeat_interleave(heads)
+ batch.row_kv_lens[first : first + 1].repeat_interleave(len(rows))

mask_heads_and_tokens_swapped (mask, M1): Bounds repeat over tokens where rows of the product repeat over heads.
- batch.row_kv_lens[first:last].repeat_interleave(heads)
+ batch.row_kv_lens[first:last].repeat(heads)

mask_always_causal (mask): The bound is the causal one whatever bounds the batch gives.
- batch.row_kv_lens[first:last].repeat_interleave(heads)
+ torch.arange(S - last + first + 1, S + 1).clamp(0, S).repeat_interleave(heads)

mask_packed_tile_rounded_down (mask): Tiles of keys end with the last whole token of 20 packed rows (FlashInfer 0.6.18).
- visible = inside & (at < bound[:, None])
+ whole = ((torch.arange(len(bound), device=at.device) // 20 + 1) * 20 // HEAD_BLOCK * HEAD_BLOCK - 1).clamp(0, len(bound) - 1); visible = inside & (at < bound[:, None]) & (at < -(-bound[whole] // TILE * TILE)[:, None])

mask_of_the_request_before (mask): Where 140 requests share 70 workers, the second has as many tiles without a mask as the first.
- bound = batch.row_kv_lens[first:last].repeat_interleave(heads)  # (M,)
+ bound = batch.row_kv_lens[first:last].repeat_interleave(heads); whole = int(batch.row_kv_lens[first - 1]) // TILE * TILE if batch.num_requests > 132 and b % 2 else 0; bound = torch.maximum(bound, bound.clamp(max=1) * min(whole, (S - 1) // TILE * TILE))

mask_context_ignored (mask, A10): New tokens see each other, but not the context before them.
- start = split * length
+ start = max(split * length, S - (last - first))

tail_last_token_dropped (tail, B3): The last key of every request is lost.
- S = int(batch.seq_lens[b])
+ S = max(int(batch.seq_lens[b]) - 1, 0)

tail_partial_page_dropped (tail, H4): Keys on a last page that is not full are lost.
- S = int(batch.seq_lens[b])
+ S = int(batch.seq_lens[b]) // cache.page_size * cache.page_size

tail_not_zeroed (tail, C4): Rows past the end keep what lies there: their weights are 0, and 0 * NaN is NaN.
- keys = torch.where(inside[:, None], keys, 0)
+ keys = torch.where(inside[:, None] | True, keys, 0)

tail_in_the_denominator (tail, C13): Lanes past the end count in the denominator with score 0.
- scores = scores.masked_fill(~visible, -INF)
+ scores = scores.masked_fill(~visible & inside, -INF)

tail_partial_tile_dropped (tail, C10): Keys behind the last full tile of a request are lost.
- stop = min(start + length, S)
+ stop = min(start + length, S // TILE * TILE)

page_off_by_one (page, H5): Keys of page i are read from page i - 1.
- page = table[(at // cache.page_size).clamp(max=(S - 1) // cache.page_size)]
+ page = table[(at // cache.page_size - 1).clamp(0, (S - 1) // cache.page_size)]

page_second_dropped (page, H6): The second page of every request is not read.
- visible = inside & (at < bound[:, None])
+ visible = inside & (at < bound[:, None]) & (at // cache.page_size != 1)

page_last_dropped (page, C4): The last page of a request is not read where there is another.
- visible = inside & (at < bound[:, None])
+ visible = inside & (at < bound[:, None]) & (at < max(cache.page_size, (S - 1) // cache.page_size * cache.page_size))

page_of_the_tile (page, H2): The page is looked up for the first key of a tile, as if no tile crossed pages.
- page = table[(at // cache.page_size).clamp(
+ page = table[(torch.full_like(at, tile) // cache.page_size).clamp(

page_size_fixed (page, H6): Pages are taken to have 16 rows.
- offset = at % cache.page_size
+ offset = at % 16 % cache.page_size

page_rows_reversed (page, H6): The rows of a page are read from its end.
- offset = at % cache.page_size
+ offset = cache.page_size - 1 - at % cache.page_size

page_offset_off_by_one (page, H5): The row after the right one is read, round the page.
- offset = at % cache.page_size
+ offset = (at + 1) % cache.page_size

page_taken_as_contiguous (page, F4): Only the first page is looked up, the others are taken to follow it.
- page = table[(at // cache.page_size).clamp(max=(S - 1) // cache.page_size)]
+ page = (table[0] + (at // cache.page_size).clamp(max=(S - 1) // cache.page_size)) % cache.num_pages

page_past_the_table (page, H4): Lanes past the end look up table entries that hold no page.
- table[(at // cache.page_size).clamp(max=(S - 1) // cache.page_size)]
+ table[(at // cache.page_size).clamp(max=len(table) - 1)]

page_row_stride (page, F4): Rows are taken to lie L apart, not L + R.
- cache.layout.read(cache.data[page, offset])
+ cache.layout.read(cache.data.reshape(-1)[((page * cache.page_size + offset) * L)[:, None] + torch.arange(L + need.R)])

split_last_key_dropped (split, C12): Every range of keys ends one key early.
- stop = min(start + length, S)
+ stop = min(start + length, S) - 1

split_border_read_twice (split, C12): Every range takes the first key of the next one too.
- stop = min(start + length, S)
+ stop = min(start + length + 1, S)

split_remainder_dropped (split, C10): The keys left over by an equal split are lost.
- length = -(-S // SPLITS)
+ length = S // SPLITS

split_last_dropped (split, C10): The last range of keys is not read.
- for split in range(SPLITS):
+ for split in range(SPLITS - 1):

split_second_dropped (split, C12): The second range of keys is not read.
- if start < stop:
+ if start < stop and split != 1:

split_partials_stale (split, C12): Ranges without keys keep the partial results of an earlier request or call.
- part_lse = torch.full((SPLITS, len(rows)), -INF, dtype=wide, device=rows.device)
+ part_lse = vars(attend).setdefault(len(rows), torch.full((SPLITS, len(rows)), -INF, dtype=wide))

split_partials_zero (split, C10): Ranges without keys are combined with an LSE of 0.
- part_lse = torch.full((SPLITS, len(rows)), -INF, dtype=wide, device=rows.device)
+ part_lse = torch.zeros(SPLITS, len(rows), dtype=wide, device=rows.device)

split_partials_infinite (split, A5): Ranges without keys are combined with an LSE of +inf.
- part_lse = torch.full((SPLITS, len(rows)), -INF, dtype=wide, device=rows.device)
+ part_lse = torch.full((SPLITS, len(rows)), INF, dtype=wide, device=rows.device)

split_tiles_overlap (split, C12): Tiles begin one key early, so that keys at their borders count twice.
- for tile in range(start, stop, TILE):
+ for tile in range(start, stop, TILE - 1):

split_partial_tile_dropped (split, C10): A last tile that is not full is left out of its range.
- for tile in range(start, stop, TILE):
+ for tile in range(start, max(stop - TILE + 1, start + 1), TILE):

split_lanes_past_the_end (split, C13): Lanes of a tile past the end of its range count with score 0.
- visible = inside & (at < bound[:, None])
+ visible = at < bound[:, None]

batch_pages_of_the_first (batch, CG1): All requests read the pages of the first one.
- table = batch.block_table[b].long()
+ table = batch.block_table[0].long()

batch_table_by_row (batch, M1): The block table is indexed by query row, not by request.
- table = batch.block_table[b].long()
+ table = batch.block_table[min(first, batch.num_requests - 1)].long()

batch_length_of_the_first (batch, CG3): Ranges of keys are sized by the first request's length.
- length = -(-S // SPLITS)
+ length = -(-int(batch.seq_lens[0]) // SPLITS)

batch_length_of_the_last (batch, CG3): All requests have the length of the last one, if it is shorter.
- S = int(batch.seq_lens[b])
+ S = min(int(batch.seq_lens[b]), int(batch.seq_lens[-1]))

batch_query_of_the_first_row (batch, M5): All rows of a request have the query of its first row.
- rows = query[first:last].flatten(0, 1)
+ rows = query[first : first + 1].expand(last - first, -1, -1).flatten(0, 1)

batch_queries_reordered (batch, Q1): Queries are taken in the order of another sort of the batch.
- rows = query[first:last].flatten(0, 1)
+ rows = query[: batch.query_start_loc[-1]].roll(-1, 0)[first:last].flatten(0, 1)

offset_32_bits (offset, G1, large): Element offsets into the cache wrap at 2^31.
- cache.layout.read(cache.data[page, offset])
+ cache.layout.read(cache.data.flatten(0, 1)[((page * cache.page_size + offset) * len(query.T)).int() // len(query.T)])

memory_output_not_initialised (memory, C6): Rows that belong to no request are never written.
- out = torch.zeros(T, N, L, dtype=wide, device=q_latent.device)
+ out = torch.empty(T, N, L, dtype=wide, device=q_latent.device)
"""  # noqa: E501  an edit is one line, as long as it takes
