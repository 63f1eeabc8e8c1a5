#include "server/remote_reads.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/prepare_index_q.h"
#include "kernels/read_entries.h"
#include "kernels/rope.h"
#include "kernels/select_topk.h"
#include "proto/errors.h"
#include "proto/needle.pb.h"

namespace needle::server {

namespace {

constexpr int64_t kQueriesMax = 1024;
constexpr int64_t kEntriesMax = 65'536;       // of one ReadEntries
constexpr int64_t kReplyBytesMax = 64 << 20;  // 65,536 entries of the widest element

absl::Status invalid(const std::string& message) { return make_error(ErrorCode::kInvalid, message); }

// Kernels answer with plain codes; at this border they become ours.
absl::Status ours(const absl::Status& status) {
  if (status.ok()) return status;
  return make_error(ErrorCode::kInvalid, std::string(status.message()));
}

LayerView view_of(const KernelReads::Pool& pool, const PageLayout& layout, int component, int layer) {
  const Component& format = pool.format.components[static_cast<size_t>(component)];
  LayerView view;
  view.base = pool.base + layout.layer_offset(component, layer);
  view.page_stride = layout.page_stride(component);
  view.page_count = pool.page_count;
  view.slots_per_page = layout.slots_per_page(component);
  view.head_dim = format.head_dim;
  view.element = format.element;
  view.scale = format.scale;
  return view;
}

std::vector<int32_t> page_ids(const PageTable& table) {
  std::vector<int32_t> ids;
  ids.reserve(table.paged.size());
  for (PageId page : table.paged) ids.push_back(page.index.is_none() ? kNoPage : static_cast<int32_t>(page.index.value()));
  return ids;
}

// Bytes on 64, as scratch wants them.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes) : storage_(static_cast<size_t>(bytes) + 64) {}
  void* data() {
    void* start = storage_.data();
    size_t space = storage_.size();
    return std::align(64, storage_.size() - 64, start, space);
  }

 private:
  std::vector<std::byte> storage_;
};

// A list of the k best so far, one row a query.
struct Best {
  Best(int64_t queries, int64_t k)
      : positions(static_cast<size_t>(queries * k), -1),
        slots(positions),
        scores(positions.size(), 0.0f),
        counts(static_cast<size_t>(queries), 0) {}
  std::vector<int32_t> positions;
  std::vector<int32_t> slots;
  std::vector<float> scores;
  std::vector<int32_t> counts;
};

}  // namespace

std::vector<KernelReads::Pool> KernelReads::pools_of(const NodePlan& plan, const HostMemory& memory) {
  std::vector<Pool> pools;
  for (size_t i = 0; i < plan.sets.size(); ++i) {
    const PoolId id = pool_id(PoolSetId(static_cast<uint32_t>(i)), PoolKind::kPaged);
    const PoolShape& shape = plan.shapes[id.value()];
    pools.push_back({plan.sets[i].formats.paged, memory.base(id), shape.chunk_bytes * shape.chunks_max / shape.page_bytes});
  }
  return pools;
}

KernelReads::KernelReads(std::vector<Pool> pools, int64_t threads, int64_t scratch_bytes)
    : pools_(std::move(pools)), workers_(static_cast<int>(threads)), scratch_bytes_(scratch_bytes) {}

absl::Status KernelReads::read_topk(const PageTable& table, PoolSetId set, const v1::ReadTopkRequest& request, v1::ReadTopkReply& reply) {
  const Pool& pool = pools_[set.value()];
  int component = 0;
  while (component < static_cast<int>(pool.format.components.size()) &&
         pool.format.components[static_cast<size_t>(component)].kind != ComponentKind::kIndexK)
    ++component;
  if (component == static_cast<int>(pool.format.components.size()))
    return make_error(ErrorCode::kImpossible, "this pool's format has no index-K");
  const Component& format = pool.format.components[static_cast<size_t>(component)];
  const int64_t queries = request.positions_size();
  const int64_t heads = request.heads();
  const int64_t k = request.k();
  if (static_cast<int64_t>(request.layer()) >= format.layers)
    return invalid(absl::StrCat("layer ", request.layer(), " of ", format.layers, " with index-K"));
  if (queries < 1 || queries > kQueriesMax) return invalid(absl::StrCat(queries, " queries; 1 to ", kQueriesMax, " a call"));
  if (heads < 1 || heads > kIndexHeadsMax) return invalid(absl::StrCat(heads, " heads; 1 to ", kIndexHeadsMax));
  if (k < 1 || k > kTopkMax) return invalid(absl::StrCat("k is ", k, "; 1 to ", kTopkMax));
  if (static_cast<int64_t>(request.q().size()) != queries * heads * kIndexHeadDim * 2) {
    return invalid(absl::StrCat("q has ", request.q().size(), " bytes; ", queries, " queries x ", heads, " heads x 128 in bf16 have ",
                                queries * heads * kIndexHeadDim * 2));
  }
  if (static_cast<int64_t>(request.head_weights().size()) != queries * heads * 4) {
    return invalid(absl::StrCat("head_weights has ", request.head_weights().size(), " bytes; ", queries, " queries x ", heads,
                                " heads in fp32 have ", queries * heads * 4));
  }
  absl::StatusOr<PageLayout> layout = PageLayout::of(pool.format);
  if (!layout.ok()) return ours(layout.status());
  const LayerView keys = view_of(pool, *layout, component, static_cast<int>(request.layer()));
  const std::vector<int32_t> pages = page_ids(table);
  const CpuIsa isa = best_cpu_isa();

  // Strings are not aligned for numbers: copied once.
  std::vector<uint16_t> q(static_cast<size_t>(queries * heads * kIndexHeadDim));
  std::memcpy(q.data(), request.q().data(), request.q().size());
  std::vector<float> weights(static_cast<size_t>(queries * heads));
  std::memcpy(weights.data(), request.head_weights().data(), request.head_weights().size());
  std::vector<int32_t> visible(static_cast<size_t>(queries));
  for (int64_t t = 0; t < queries; ++t) {
    const int64_t position = request.positions(static_cast<int>(t));
    visible[static_cast<size_t>(t)] =
        static_cast<int32_t>(std::min(entries_complete(position + 1, format.ratio), entries_complete(table.tokens, format.ratio)));
  }
  OpReport report{};
  if (!request.q_is_prepared()) {
    // A table of just the positions asked for: row t holds query t's.
    std::vector<float> rope(static_cast<size_t>(queries) * kRopeDims);
    std::vector<int64_t> rows(static_cast<size_t>(queries));
    if (format.rope != RopeStyle::kNone) {
      float frequencies[kRopePairs];
      if (absl::Status status = rope_inverse_frequencies(format.rope_table, frequencies); !status.ok()) return ours(status);
      for (int64_t t = 0; t < queries; ++t) {
        rows[static_cast<size_t>(t)] = t;
        const absl::Status built =
            build_rope_table(frequencies, request.positions(static_cast<int>(t)), 1, rope.data() + t * kRopeDims, workers_);
        if (!built.ok()) return ours(built);
      }
    }
    std::vector<uint16_t> prepared(q.size());
    std::vector<float> prepared_weights(weights.size());
    PrepareIndexQArgs prepare;
    prepare.component = format;
    if (format.rope != RopeStyle::kNone) {
      prepare.rope = {rope.data(), queries};
      prepare.positions = rows.data();
    }
    prepare.q = {q.data(), heads * kIndexHeadDim, RowElement::kBf16};
    prepare.raw_weights = {weights.data(), heads, RowElement::kFp32};
    prepare.tokens = queries;
    prepare.heads = static_cast<int32_t>(heads);
    prepare.out_q = prepared.data();
    prepare.out_weights = prepared_weights.data();
    prepare.report = &report;
    if (absl::Status status = prepare_index_q_cpu(prepare, isa, workers_); !status.ok()) return ours(status);
    q.swap(prepared);
    weights.swap(prepared_weights);
  }

  const int64_t entries = *std::max_element(visible.begin(), visible.end());
  const int64_t slots = keys.slots_per_page;
  const int64_t chunk = std::max(slots, scratch_bytes_ / 4 / queries / slots * slots);
  const int64_t stride = std::min(chunk, round_up(std::max<int64_t>(entries, 1), slots));
  std::vector<float> scores(static_cast<size_t>(queries * stride));
  const std::vector<int32_t> row_zero(static_cast<size_t>(queries), 0);
  Best best(queries, k);
  for (int64_t begin = 0; begin == 0 || begin < entries; begin += stride) {
    const int32_t entry_base = static_cast<int32_t>(begin);
    IndexLogitsArgs logits;
    logits.keys = keys;
    logits.pages = {pages.data(), nullptr, static_cast<int64_t>(pages.size()), 1, static_cast<int32_t>(pages.size())};
    logits.q = q.data();
    logits.head_weights = weights.data();
    logits.query_row = row_zero.data();
    logits.visible = visible.data();
    logits.query_count = static_cast<int32_t>(queries);
    logits.heads = static_cast<int32_t>(heads);
    logits.entry_begin = begin;
    logits.entry_count = std::min(stride, std::max<int64_t>(entries - begin, 0));
    logits.scores = scores.data();
    logits.score_stride = stride;
    logits.report = &report;
    if (logits.entry_count > 0) {
      if (absl::Status status = index_logits_cpu(logits, isa, workers_); !status.ok()) return ours(status);
    }
    std::vector<int32_t> lengths;
    for (int32_t sees : visible) lengths.push_back(static_cast<int32_t>(std::clamp<int64_t>(sees - begin, 0, logits.entry_count)));
    Best found(queries, k);
    SelectTopkArgs select;
    select.scores = scores.data();
    select.score_stride = stride;
    select.lengths = lengths.data();
    select.rows = static_cast<int32_t>(queries);
    select.length_max = static_cast<int32_t>(logits.entry_count);
    select.k = static_cast<int32_t>(k);
    select.order = request.by_rank() ? TopkOrder::kByRank : TopkOrder::kByPosition;
    const int64_t first_page = begin / slots;
    select.pages = {pages.data() + first_page, &entry_base, static_cast<int64_t>(pages.size()) - first_page, 1,
                    static_cast<int32_t>(static_cast<int64_t>(pages.size()) - first_page)};
    select.row_of = row_zero.data();
    select.slots_per_page = static_cast<int32_t>(slots);
    select.page_count = pool.page_count;
    select.positions = found.positions.data();
    select.slots = request.with_slots() ? found.slots.data() : nullptr;
    select.out_scores = found.scores.data();
    select.counts = found.counts.data();
    select.out_stride = k;
    select.report = &report;
    const int64_t select_bytes = select_topk_cpu_scratch(select, workers_.width());
    AlignedBytes select_scratch(select_bytes);
    if (absl::Status status = select_topk_cpu(select, isa, workers_, select_scratch.data(), select_bytes); !status.ok())
      return ours(status);
    if (begin == 0) {
      best = std::move(found);
      continue;
    }
    // The lists of this chunk and of all before it, by the same total order.
    const auto joined = [](auto a, const auto& b) {
      a.insert(a.end(), b.begin(), b.end());
      return a;
    };
    const std::vector<int32_t> positions = joined(best.positions, found.positions);
    const std::vector<int32_t> slot_lists = joined(best.slots, found.slots);
    const std::vector<float> score_lists = joined(best.scores, found.scores);
    const std::vector<int32_t> counts = joined(best.counts, found.counts);
    Best merged(queries, k);
    MergeTopkArgs merge;
    merge.positions = positions.data();
    merge.scores = score_lists.data();
    merge.counts = counts.data();
    merge.slots = request.with_slots() ? slot_lists.data() : nullptr;
    merge.shards = 2;
    merge.rows = static_cast<int32_t>(queries);
    merge.in_stride = k;
    merge.k = static_cast<int32_t>(k);
    merge.order = select.order;
    merge.out_positions = merged.positions.data();
    merge.out_scores = merged.scores.data();
    merge.out_slots = request.with_slots() ? merged.slots.data() : nullptr;
    merge.out_counts = merged.counts.data();
    merge.out_stride = k;
    merge.report = &report;
    const int64_t merge_bytes = merge_topk_cpu_scratch(merge, workers_.width());
    AlignedBytes merge_scratch(merge_bytes);
    if (absl::Status status = merge_topk_cpu(merge, workers_, merge_scratch.data(), merge_bytes); !status.ok()) return ours(status);
    best = std::move(merged);
  }

  reply.set_stride(static_cast<uint32_t>(k));
  reply.mutable_positions()->Add(best.positions.begin(), best.positions.end());
  if (request.with_scores()) reply.mutable_scores()->Add(best.scores.begin(), best.scores.end());
  if (request.with_slots()) reply.mutable_slots()->Add(best.slots.begin(), best.slots.end());
  for (int32_t count : best.counts) reply.add_counts(static_cast<uint32_t>(count));
  reply.set_variant(static_cast<uint32_t>(score_variant(isa)));
  reply.set_report_status(report.status);
  reply.set_nan_scores(report.nan_scores);
  reply.set_absent_entries(report.absent_entries);
  return absl::OkStatus();
}

absl::Status KernelReads::read_entries(const PageTable& table, PoolSetId set, const v1::ReadEntriesRequest& request,
                                       v1::ReadEntriesReply& reply) {
  const Pool& pool = pools_[set.value()];
  if (request.component() >= pool.format.components.size()) {
    return invalid(absl::StrCat("component ", request.component(), " of ", pool.format.components.size(), " in the paged format"));
  }
  const int component = static_cast<int>(request.component());
  const Component& format = pool.format.components[request.component()];
  if (static_cast<int64_t>(request.layer()) >= format.layers)
    return invalid(absl::StrCat("layer ", request.layer(), " of ", format.layers));
  if (format.element == ElementFormat::kFp32Rows) return invalid("state records have no entries");
  const int64_t count = request.entries_size();
  if (count < 1 || count > kEntriesMax) return invalid(absl::StrCat(count, " entries; 1 to ", kEntriesMax, " a call"));
  const int64_t data_bytes = slot_data_bytes(format.element, format.head_dim);
  const int64_t scale_bytes = slot_scale_bytes(format.element, format.head_dim);
  if (count * (data_bytes + scale_bytes) > kReplyBytesMax)
    return invalid(absl::StrCat(count, " entries of ", data_bytes + scale_bytes, " bytes exceed ", kReplyBytesMax));
  const int64_t complete = entries_complete(table.tokens, format.ratio);
  for (int32_t entry : request.entries()) {
    if (entry < -1 || entry >= complete) return invalid(absl::StrCat("entry ", entry, " of a sequence with ", complete));
  }
  absl::StatusOr<PageLayout> layout = PageLayout::of(pool.format);
  if (!layout.ok()) return ours(layout.status());
  const std::vector<int32_t> pages = page_ids(table);
  std::vector<std::byte> raw(static_cast<size_t>(count * (data_bytes + scale_bytes)));
  OpReport report{};
  ReadEntriesArgs args;
  args.layer = view_of(pool, *layout, component, static_cast<int>(request.layer()));
  args.positions = request.entries().data();
  args.rows = 1;
  args.ids_per_row = static_cast<int32_t>(count);
  args.id_stride = count;
  args.pages = {pages.data(), nullptr, static_cast<int64_t>(pages.size()), 1, static_cast<int32_t>(pages.size())};
  args.form = ReadForm::kRaw;
  args.out = raw.data();
  args.entry_stride = data_bytes + scale_bytes;
  args.row_stride = static_cast<int64_t>(raw.size());
  args.report = &report;
  if (absl::Status status = read_entries_cpu(args, best_cpu_isa(), workers_); !status.ok()) return ours(status);
  reply.set_data_bytes(static_cast<uint32_t>(data_bytes));
  reply.set_scale_bytes(static_cast<uint32_t>(scale_bytes));
  std::string* data = reply.mutable_data();
  std::string* scales = reply.mutable_scales();
  for (int64_t i = 0; i < count; ++i) {
    const char* entry = reinterpret_cast<const char*>(raw.data()) + i * (data_bytes + scale_bytes);
    data->append(entry, static_cast<size_t>(data_bytes));
    scales->append(entry + data_bytes, static_cast<size_t>(scale_bytes));
  }
  return absl::OkStatus();
}

}  // namespace needle::server
