// How each op of a Program runs: prepare rows, share the work out, meet at a barrier.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "runtime.h"

namespace ff {

// A thread outside the team sets the flag within milliseconds; it may need this core to get there.
static void await(const uint8_t* flag) {
  while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) std::this_thread::yield();
}

int Runtime::rows_of(int32_t slot, const Walk& w) const {
  return spec_.slot_is_logit_rows[size_t(slot)] ? w.chunk_rows : batch_->token_count;
}

Compute Runtime::compute_of(const Matrix& m) const {
  if (spec_.integers == Compute::f32) return Compute::f32;
  if (m.elem == Elem::ints) return spec_.integers;
  return m.elem == Elem::bf16 || is_fp8(m.elem) ? Compute::bf16 : Compute::f32;
}

NormArgs Runtime::norm_args(const NormRef& n) const {
  return {vector(n.weight), vector(n.bias), n.eps, n.offset, n.layer};
}

template <class Body>
void Runtime::share_rows(Walk& w, int rows, int grain, Body&& body) {
  const int items = (rows + grain - 1) / grain;
  for (int i = team_.claim(w.member); i < items; i = team_.claim(w.member))
    body(i * grain, std::min(rows, (i + 1) * grain));
  team_.barrier(w.member);
}

Runtime::Grain Runtime::grain_of(const Op& op) const {
  if (k_.tile_unit && compute_of(spec_.matrices[size_t(op.segments[0].matrix)]) == Compute::bf16)
    return {32, 2, true};
  return {12, 1, false};
}

// As measured for this op, or by a rule that is good everywhere. The result is the same to the bit.
Division Runtime::divide(const Op& op, int segments, int rows) const {
  for (const Division& d : op.divisions)
    if (rows >= d.least && rows <= d.most) return d;
  const Grain grain = grain_of(op);
  const bool unit = grain.tile_unit;
  const int threads = team_.size();
  int tiles = 0;
  for (int s = 0; s < segments; s++) tiles += spec_.matrices[size_t(op.segments[size_t(s)].matrix)].tiles();
  const int k = spec_.matrices[size_t(op.segments[0].matrix)].k;
  Division d;
  d.stream_rows = k_.stream_rows;
  // Few rows: reading the weights is what takes the time.
  d.runs = rows <= (unit ? 32 : kStreamRows);
  // Blocks small enough that the last one does not keep the others waiting; at least one tile.
  d.block = kBlockTiles;
  if (d.runs)
    d.block = std::clamp(tiles / (threads * 8) / grain.tiles * grain.tiles, grain.tiles, kBlockTiles);
  // The rows of a chunk are read once per tile or pair of tiles: they should stay in the second-level cache.
  const int fitting = (1 << (unit ? 19 : 18)) / k / grain.rows * grain.rows;
  const int most = std::clamp(fitting, unit ? 64 : 96, kRowChunk / grain.rows * grain.rows);
  int chunks = (rows + most - 1) / most;
  // More row chunks when there are few blocks; a chunk must be worth unpacking its panel.
  const int least = unit ? 64 : 24;
  while (tiles / d.block * chunks < 4 * threads && rows / (chunks + 1) >= least) chunks++;
  d.chunk = (rows + chunks - 1) / chunks;
  return d;
}

template <class Body>
void Runtime::share_blocks(Walk& w, const Op& op, int segments, const Division& d, int rows, Body&& body) {
  const int threads = team_.size();
  // Chunks of one size, in rows that are computed together.
  const Grain grain = grain_of(op);
  const int most = std::min(d.chunk, kRowChunk / grain.rows * grain.rows), least = (rows + most - 1) / most;
  const int chunk = ((rows + least - 1) / least + grain.rows - 1) / grain.rows * grain.rows;
  const int chunks = (rows + chunk - 1) / chunk;

  int item = team_.claim(w.member), first = 0;
  for (int s = 0; s < segments; s++) {
    const int n = spec_.matrices[size_t(op.segments[size_t(s)].matrix)].tiles();
    // What a member prefetches past the end of a short run is fetched twice.
    const int share = ((n + threads - 1) / threads + grain.tiles - 1) / grain.tiles * grain.tiles;
    const int span = d.runs ? std::max(d.block, share) : d.block;
    const int spans = (n + span - 1) / span, items = spans * chunks;
    for (; item - first < items; item = team_.claim(w.member)) {
      const int begin = (item - first) / chunks * span, end = std::min(n, begin + span);
      const int c = (item - first) % chunks;
      for (int tile = begin; tile < end; tile += d.block)
        body(s, tile, std::min(end, tile + d.block), c * chunk, std::min(rows, (c + 1) * chunk));
    }
    first += items;
  }
  team_.barrier(w.member);
}

void Runtime::execute(const Op& op, Walk& w) {
  switch (op.kind) {
    case OpKind::embed: return embed(op, w);
    case OpKind::norm: return norm(op, w);
    case OpKind::linear: return op.act == Act::none ? linear(op, w) : gated(op, w);
    case OpKind::logits: return linear(op, w);
    case OpKind::rope: return rope(op, w);
    case OpKind::attention: return attention(op, w);
    case OpKind::gate:
    case OpKind::add:
    case OpKind::scale: return elementwise(op, w);
    case OpKind::gather: return gather(op, w);
  }
}

void Runtime::rotations(Walk& w) {
  share_rows(w, batch_->token_count, 32, [&](int begin, int end) {
    for (size_t t = 0; t < spec_.ropes.size(); t++) {
      const RopeTable& table = spec_.ropes[t];
      const size_t half = table.inv_freq.size();
      for (int r = begin; r < end; r++)
        for (size_t i = 0; i < half; i++) {
          const float angle = float(position_[size_t(r)]) * table.inv_freq[i];
          cos_[t][size_t(r) * half + i] = float(std::cos(double(angle))) * table.scale;
          sin_[t][size_t(r) * half + i] = float(std::sin(double(angle))) * table.scale;
        }
    }
  });
}

void Runtime::embed(const Op& op, Walk& w) {
  const Matrix& m = spec_.matrices[size_t(op.segments[0].matrix)];
  share_rows(w, batch_->token_count, 8, [&](int begin, int end) {
    k_.embed_rows(m, batch_->tokens, op.scale, at(op.out), stride(op.out.slot), begin, end);
  });
}

void Runtime::norm(const Op& op, Walk& w) {
  const float* residual = op.residual < 0 ? nullptr : slot_[size_t(op.residual)];
  share_rows(w, rows_of(op.out.slot, w), 4, [&](int begin, int end) {
    k_.norm_rows(norm_args(op.norm), at(op.x), stride(op.x.slot), at(op.out), stride(op.out.slot), residual,
                 residual ? stride(op.residual) : 0, op.out.width, op.heads, begin, end);
  });
}

// The rows of op.x, normed and in the forms its matrices need. A small batch is prepared by every member for
// itself, which costs less than a barrier; a large one is shared.
ActRows Runtime::prepare(const Op& op, int rows, Walk& w) {
  PrepareArgs a{};
  a.x = at(op.x);
  a.x_stride = stride(op.x.slot);
  a.k = op.x.width;
  a.norm = norm_args(op.norm);
  for (const Segment& s : op.segments) {
    const Compute c = compute_of(spec_.matrices[size_t(s.matrix)]);
    a.want_q |= c == Compute::int8;
    a.want_bf16 |= c == Compute::bf16;
  }
  a.outliers = op.outliers.data();
  a.outlier_count = int32_t(op.outliers.size());
  const bool local = rows <= kStreamRows;
  ThreadState& mine = threads_[size_t(w.member.id)];
  a.to = local ? mine.rows : shared_;
  a.normed = local ? mine.normed : shared_normed_;
  a.normed_stride = normed_stride_;
  a.to.f32 = a.norm.weight ? a.normed : a.x;
  a.to.f32_stride = a.norm.weight ? a.normed_stride : a.x_stride;
  if (!a.norm.weight && !a.want_q && !a.want_bf16) {
    // nothing to do: the rows are read where they are
  } else if (local) {
    k_.prepare_rows(a, 0, rows);
  } else {
    share_rows(w, rows, 8, [&](int begin, int end) { k_.prepare_rows(a, begin, end); });
  }
  if (!observed_.empty() && w.member.id == 0) observe(op, a.to, rows);
  return a.to;
}

// Largest magnitude of each column of the op's input, over the rows of this step and those before.
void Runtime::observe(const Op& op, const ActRows& rows, int count) {
  std::vector<float>& largest = observed_[size_t(&op - spec_.ops.data())];
  for (int r = 0; r < count; r++)
    for (size_t i = 0; i < largest.size(); i++)
      largest[i] = std::max(largest[i], std::fabs(rows.f32[size_t(r) * rows.f32_stride + i]));
}

void Runtime::start_observing() {
  observed_.assign(spec_.ops.size(), {});
  for (size_t i = 0; i < spec_.ops.size(); i++)
    if (spec_.ops[i].kind == OpKind::linear || spec_.ops[i].kind == OpKind::logits)
      observed_[i].assign(size_t(spec_.ops[i].x.width), 0.0f);
}

MatmulArgs Runtime::matmul_args(const Op& op, const Segment& s, const Division& d,
                                const ActRows& rows) const {
  MatmulArgs a{};
  a.stream_rows = d.stream_rows;
  a.outlier_columns = s.outlier_columns;
  a.outlier_count = int32_t(op.outliers.size());
  a.w = &spec_.matrices[size_t(s.matrix)];
  a.compute = compute_of(*a.w);
  a.act = rows;
  a.out.bias = vector(s.bias);
  return a;
}

// Null behind the last one.
static const uint8_t* tile_of(const Matrix& m, int tile) {
  return tile < m.tiles() ? m.data + size_t(tile) * m.tile_bytes() : nullptr;
}

void Runtime::linear(const Op& op, Walk& w) {
  const int rows = rows_of(op.out.slot, w);
  const ActRows prepared = prepare(op, rows, w);
  uint8_t* scratch = threads_[size_t(w.member.id)].scratch;
  const int segments = int(op.segments.size());
  const Division d = divide(op, segments, rows);
  share_blocks(w, op, segments, d, rows, [&](int segment, int tile0, int tile1, int row0, int row1) {
    int column = 0;
    for (int s = 0; s < segment; s++) column += spec_.matrices[size_t(op.segments[size_t(s)].matrix)].n;
    MatmulArgs a = matmul_args(op, op.segments[size_t(segment)], d, prepared);
    a.out.out = at(op.out) + column;
    a.out.stride = stride(op.out.slot);
    a.out.scale = op.scale;
    a.out.softcap = op.softcap;
    a.next = tile_of(*a.w, tile1);
    if (op.residual >= 0) {
      a.out.residual = slot_[size_t(op.residual)] + column;
      a.out.residual_stride = stride(op.residual);
    }
    k_.matmul_block(a, tile0, tile1, row0, row1, scratch);
  });
}

// out = act(x gate^T) * (x up^T), block by block: the gate's block stays in the thread's cache.
void Runtime::gated(const Op& op, Walk& w) {
  const int rows = rows_of(op.out.slot, w);
  const ActRows prepared = prepare(op, rows, w);
  ThreadState& mine = threads_[size_t(w.member.id)];
  const Division d = divide(op, 1, rows);
  share_blocks(w, op, 1, d, rows, [&](int, int tile0, int tile1, int row0, int row1) {
    MatmulArgs g = matmul_args(op, op.segments[0], d, prepared);
    g.out.out = mine.gate;
    g.out.stride = kBlockTiles * kTile;
    g.out.row_base = row0;
    g.out.column_base = tile0 * kTile;
    g.next = tile_of(spec_.matrices[size_t(op.segments[1].matrix)], tile0);
    k_.matmul_block(g, tile0, tile1, row0, row1, mine.scratch);
    MatmulArgs u = matmul_args(op, op.segments[1], d, prepared);
    u.out.out = at(op.out);
    u.out.stride = stride(op.out.slot);
    u.out.gate = mine.gate;
    u.out.gate_stride = kBlockTiles * kTile;
    u.out.act = op.act;
    u.next = tile_of(*g.w, tile1);
    if (op.residual >= 0) {
      u.out.residual = slot_[size_t(op.residual)];
      u.out.residual_stride = stride(op.residual);
    }
    k_.matmul_block(u, tile0, tile1, row0, row1, mine.scratch);
  });
}

void Runtime::rope(const Op& op, Walk& w) {
  const size_t t = size_t(op.rope);
  share_rows(w, rows_of(op.out.slot, w), 8, [&](int begin, int end) {
    k_.rope_rows(at(op.x), stride(op.x.slot), at(op.out), stride(op.out.slot), op.heads, op.head_dim,
                 int(2 * spec_.ropes[t].inv_freq.size()), cos_[t], sin_[t], begin, end);
  });
}

void Runtime::attention(const Op& op, Walk& w) {
  AttentionArgs a{};
  a.q = at(op.x), a.k = at(op.y), a.v = at(op.z);
  a.q_stride = stride(op.x.slot), a.k_stride = stride(op.y.slot), a.v_stride = stride(op.z.slot);
  a.out = at(op.out);
  a.out_stride = stride(op.out.slot);
  a.rows = batch_->token_count;
  a.heads = op.heads, a.kv_heads = op.kv_heads, a.head_dim = op.head_dim;
  a.scale = op.scale, a.window = op.window, a.softcap = op.softcap;
  a.sinks = vector(op.sinks);
  a.q_norm = {vector(op.norm.weight), op.norm.eps, op.norm.offset};
  a.k_norm = {vector(op.k_norm.weight), op.k_norm.eps, op.k_norm.offset};
  if (op.rope >= 0) {
    a.cos = cos_[size_t(op.rope)], a.sin = sin_[size_t(op.rope)];
    a.rope_dim = int(2 * spec_.ropes[size_t(op.rope)].inv_freq.size());
  }
  a.exact = spec_.integers == Compute::f32;
  a.kv = kv_layers_[size_t(op.layer)];
  a.seqs = batch_->seqs;
  a.partials = reinterpret_cast<float*>(partials_.data);
  a.part_counts = part_counts_.data();
  share_rows(w, a.rows, a.rows >= 256 ? kBlockTokens : 8,
             [&](int begin, int end) { k_.attention_prologue(a, begin, end); });
  const AttentionPlan& plan = plans_[size_t(plan_of_[size_t(&op - spec_.ops.data())])];
  float* scratch = reinterpret_cast<float*>(threads_[size_t(w.member.id)].scratch);
  share_rows(w, plan.count, 1,
             [&](int begin, int) { k_.attention_item(a, plan.items[size_t(begin)], scratch); });
}

void Runtime::elementwise(const Op& op, Walk& w) {
  share_rows(w, rows_of(op.out.slot, w), 8, [&](int begin, int end) {
    if (op.kind == OpKind::gate) {
      k_.gate_rows(op.act, at(op.x), stride(op.x.slot), at(op.y), stride(op.y.slot), at(op.out),
                   stride(op.out.slot), op.out.width, begin, end);
    } else {
      const bool add = op.kind == OpKind::add;
      k_.add_rows(at(op.x), stride(op.x.slot), op.scale, add ? at(op.y) : nullptr,
                  add ? stride(op.y.slot) : 0, at(op.out), stride(op.out.slot), op.out.width, begin, end);
    }
  });
}

void Runtime::gather(const Op& op, Walk& w) {
  share_rows(w, w.chunk_rows, 8, [&](int begin, int end) {
    for (int r = begin; r < end; r++)
      std::memcpy(at(op.out) + size_t(r) * stride(op.out.slot),
                  at(op.x) + size_t(batch_->samples[w.chunk_begin + r].row) * stride(op.x.slot),
                  size_t(op.out.width) * sizeof(float));
  });
}

void Runtime::sample(const Op& logits, Walk& w) {
  const size_t vocab = size_t(spec_.vocab);
  if (batch_->masks_ready) await(batch_->masks_ready);
  share_rows(w, w.chunk_rows, 1, [&](int begin, int end) {
    for (int r = begin; r < end; r++) {
      float* row = at(logits.out) + size_t(r) * stride(logits.out.slot);
      const int index = w.chunk_begin + r;
      if (batch_->logits) std::memcpy(batch_->logits + size_t(index) * vocab, row, vocab * sizeof(float));
      k_.sample_row(row, spec_.vocab, batch_->samples[index], batch_->inputs, batch_->outputs, index,
                    threads_[size_t(w.member.id)].scratch);
    }
  });
}

}  // namespace ff
