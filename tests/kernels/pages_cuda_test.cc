// checksum_pages, read_entries and copy_pages on the GPU: the batteries of the first two, copies in every direction, and
// copies to and from another GPU's memory where there is one in reach.
#include <gtest/gtest.h>

#include "kernels/copy_pages.h"
#include "tests/kernels/checksum_pages_battery.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/peer_memory.h"
#include "tests/kernels/read_entries_battery.h"

namespace needle::testing {
namespace {

absl::Status checksum_on_device(const ChecksumPagesArgs& host) {
  if (!check_checksum_pages(host).ok()) return checksum_pages_cuda(host, nullptr);
  DeviceCopies copies;
  ChecksumPagesArgs args = host;
  args.base = copies.in(host.base, reach(host.page_count, host.page_stride, host.page_bytes));
  args.pages = copies.in(host.pages, host.count);
  args.checksums = copies.in_out(host.checksums, host.count);
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(checksum_pages_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

absl::Status read_on_device(const ReadEntriesArgs& host) {
  if (!check_read_entries(host).ok()) return read_entries_cuda(host, nullptr);
  DeviceCopies copies;
  ReadEntriesArgs args = host;
  const LayerView& layer = host.layer;
  args.layer.base = copies.in(
      layer.base, reach(layer.page_count, layer.page_stride, layer_page_bytes(layer.element, layer.head_dim, layer.slots_per_page)));
  args.slots = copies.in(host.slots, host.rows * host.id_stride);
  args.positions = copies.in(host.positions, host.rows * host.id_stride);
  args.pages.pages = copies.in(host.pages.pages, host.pages.rows * host.pages.row_stride);
  args.pages.entry_base = copies.in(host.pages.entry_base, host.pages.rows);
  args.row_of = copies.in(host.row_of, host.rows);
  args.out = copies.in_out(host.out, host.rows * host.row_stride);
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(read_entries_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

TEST(ChecksumPagesCuda, battery) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  for (const ChecksumCase& test : checksum_pages_battery()) {
    SCOPED_TRACE(test.name);
    test.run({"cuda", "", checksum_on_device});
  }
}

TEST(ReadEntriesCuda, battery) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  for (const ReadCase& test : read_entries_battery()) {
    SCOPED_TRACE(test.name);
    test.run({"cuda", "", read_on_device});
  }
}

// A copy from one buffer of pages to another, run by `twin` on poisoned destinations.
struct CopyWorld {
  std::vector<std::byte> from;
  std::vector<std::byte> to;
  std::vector<int32_t> from_pages;
  std::vector<int32_t> to_pages;
  std::vector<uint64_t> sums;
  OpReport report{};
  CopyPagesArgs args;

  CopyWorld(int64_t page_bytes, int64_t stride, int32_t count, bool gather, bool scatter, bool with_sums) {
    const int32_t pages = count + 5;
    Rng rng(static_cast<uint64_t>(page_bytes * 7 + count));
    from.resize(static_cast<size_t>(pages * stride));
    for (std::byte& byte : from) byte = static_cast<std::byte>(rng.next());
    to.assign(static_cast<size_t>(pages * stride), std::byte{0xA5});
    for (int32_t i = 0; i < count; ++i) {
      from_pages.push_back(i == 1 ? kNoPage : (i * 3 + 1) % pages);
      to_pages.push_back(i == 2 ? pages : pages - 1 - i);
    }
    sums.assign(static_cast<size_t>(count), 77);
    args.from = {from.data(), stride, pages};
    args.to = {to.data(), stride, pages};
    args.from_pages = gather ? from_pages.data() : nullptr;
    args.to_pages = scatter ? to_pages.data() : nullptr;
    args.page_bytes = page_bytes;
    args.count = count;
    args.checksums = with_sums ? sums.data() : nullptr;
    args.first_block = 9;
    args.report = &report;
  }
};

// Where a side's pages lie already, in memory that the GPU reaches; null: in copies of the host's.
struct Mapped {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};
absl::Status copy_on_device(const CopyPagesArgs& host, const Mapped& mapped = {}) {
  if (!check_copy_pages(host).ok()) return copy_pages_cuda(host, nullptr);
  DeviceCopies copies;
  CopyPagesArgs args = host;
  args.from.base = mapped.from;
  args.to.base = mapped.to;
  if (mapped.from == nullptr) args.from.base = copies.in(host.from.base, reach(host.from.count, host.from.stride, host.page_bytes));
  if (mapped.to == nullptr) args.to.base = copies.in_out(host.to.base, reach(host.to.count, host.to.stride, host.page_bytes));
  args.from_pages = copies.in(host.from_pages, host.count);
  args.to_pages = copies.in(host.to_pages, host.count);
  args.checksums = copies.in_out(host.checksums, host.count);
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(copy_pages_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

TEST(CopyPages, moves_every_byte_of_the_named_pages_and_no_other) {
  for (const int64_t page_bytes : {16, 64, 2304, 16384, 37440}) {
    CopyWorld world(page_bytes, page_bytes + 48, 7, true, true, false);
    ASSERT_TRUE(copy_pages_ref(world.args).ok());
    EXPECT_EQ(world.report.skipped_rows, 2u);
    EXPECT_EQ(world.report.status, kStatusAbsentPage);
    int64_t changed = 0;
    for (int32_t i = 0; i < 7; ++i) {
      if (i == 1 || i == 2) continue;
      const std::byte* from = world.from.data() + world.from_pages[static_cast<size_t>(i)] * world.args.from.stride;
      const std::byte* to = world.to.data() + world.to_pages[static_cast<size_t>(i)] * world.args.to.stride;
      EXPECT_TRUE(std::equal(from, from + page_bytes, to));
    }
    for (const std::byte byte : world.to) changed += byte != std::byte{0xA5} ? 1 : 0;
    EXPECT_LE(changed, 5 * page_bytes);
  }
}

TEST(CopyPages, refuses_what_it_cannot_do_with_value_and_limit) {
  CopyWorld world(2304, 2304, 3, true, true, true);
  const auto message = [&](const std::function<void(CopyPagesArgs&)>& spoil) {
    CopyPagesArgs args = world.args;
    spoil(args);
    EXPECT_EQ(copy_pages_cuda(args, nullptr).code(), absl::StatusCode::kInvalidArgument);
    return std::string(copy_pages_ref(args).message());
  };
  EXPECT_NE(message([](CopyPagesArgs& a) { a.page_bytes = 24; }).find("page_bytes is 24"), std::string::npos);
  EXPECT_NE(message([](CopyPagesArgs& a) { a.count = -1; }).find("count is -1"), std::string::npos);
  EXPECT_NE(message([](CopyPagesArgs& a) { a.from.stride = 2300; }).find("from.stride is 2300"), std::string::npos);
  EXPECT_NE(message([](CopyPagesArgs& a) { a.to.base = nullptr; }).find("to.base is null"), std::string::npos);
  EXPECT_NE(message([](CopyPagesArgs& a) { a.page_bytes = 80; }).find("multiple of 64"), std::string::npos);
}

// What a copy leaves beside the pages.
void expect_told_the_same(const CopyWorld& got, const CopyWorld& want) {
  EXPECT_EQ(got.sums, want.sums);
  EXPECT_EQ(got.report.skipped_rows, want.report.skipped_rows);
  EXPECT_EQ(got.report.status, want.report.status);
}

// A copy by the kernel, of at most `blocks_max` blocks, beside the reference's.
void expect_equals_the_reference(int64_t page_bytes, int32_t count, bool gather, bool scatter, bool sums, int32_t blocks_max,
                                 uint64_t* skipped = nullptr) {
  CopyWorld want(page_bytes, page_bytes + 64, count, gather, scatter, sums);
  CopyWorld got(page_bytes, page_bytes + 64, count, gather, scatter, sums);
  got.args.blocks_max = blocks_max;
  ASSERT_TRUE(copy_pages_ref(want.args).ok());
  const absl::Status done = copy_on_device(got.args);
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_TRUE(got.to == want.to);
  expect_told_the_same(got, want);
  if (skipped != nullptr) *skipped = got.report.skipped_rows;
}

TEST(CopyPagesCuda, equals_the_reference_in_every_direction_with_and_without_sums) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int64_t page_bytes : {256, 2304, 4864, 16384, 37440}) {
    for (const bool sums : {false, true}) {
      for (const int direction : {0, 1, 2, 3}) {
        for (const int32_t blocks_max : {0, 1, 16}) {
          SCOPED_TRACE(::testing::Message() << page_bytes << " bytes, sums " << sums << ", direction " << direction);
          expect_equals_the_reference(page_bytes, 9, (direction & 1) != 0, (direction & 2) != 0, sums, blocks_max);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CopyPagesCuda, a_few_blocks_take_many_pages_in_turn) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int64_t page_bytes : {256, 16384, 37440}) {
    for (const bool sums : {false, true}) {
      for (const int32_t blocks_max : {0, 1, 2, 3}) {
        SCOPED_TRACE(::testing::Message() << page_bytes << " bytes, sums " << sums << ", " << blocks_max << " blocks");
        uint64_t skipped = 0;
        expect_equals_the_reference(page_bytes, 150, true, true, sums, blocks_max, &skipped);
        if (HasFatalFailure()) return;
        EXPECT_EQ(skipped, 2u);
      }
    }
  }
}

enum class Direction { kPush, kPull };

// Copies by kernels of this GPU, with one side in the peer's memory. What the peer holds is its owner's word.
void expect_copies_with_peer(const std::function<std::unique_ptr<PeerMemory>(const Peers&, int64_t)>& memory) {
  const FoundPeers found = find_peers();
  if (!found.none_because.empty()) GTEST_SKIP() << found.none_because;
  constexpr size_t kBehind = 65536;  // poisoned, behind the last page
  struct Shape {
    int64_t page_bytes;
    int32_t count;
  };
  constexpr Shape kShapes[] = {{256, 700}, {2304, 600}, {16384, 300}, {37440, 100}, {1165824, 5}};
  const std::unique_ptr<PeerMemory> peer = memory(found.peers, int64_t{16} << 20);
  for (const Shape& shape : kShapes) {
    for (const Direction direction : {Direction::kPush, Direction::kPull}) {
      for (const bool sums : {false, true}) {
        CopyWorld want(shape.page_bytes, shape.page_bytes + 64, shape.count, true, true, sums);
        ASSERT_TRUE(copy_pages_ref(want.args).ok());
        for (const int32_t blocks_max : {0, 16, 32}) {
          SCOPED_TRACE(::testing::Message() << shape.page_bytes << " bytes, " << (direction == Direction::kPush ? "push" : "pull")
                                            << ", sums " << sums << ", " << blocks_max << " blocks");
          CopyWorld got(shape.page_bytes, shape.page_bytes + 64, shape.count, true, true, sums);
          got.args.blocks_max = blocks_max;
          std::vector<std::byte> held = direction == Direction::kPush ? got.to : got.from;
          held.resize(held.size() + kBehind, std::byte{0xA5});
          peer->write(held);
          const absl::Status done =
              copy_on_device(got.args, direction == Direction::kPush ? Mapped{nullptr, peer->mapped()} : Mapped{peer->mapped(), nullptr});
          ASSERT_TRUE(done.ok()) << done;
          const std::vector<std::byte> holds = peer->read(static_cast<int64_t>(held.size()));
          if (direction == Direction::kPush) {
            std::copy(want.to.begin(), want.to.end(), held.begin());
          } else {
            EXPECT_TRUE(got.to == want.to);
          }
          EXPECT_TRUE(holds == held);  // the named pages as the reference has them, every other byte as it was
          expect_told_the_same(got, want);
        }
      }
    }
  }
}

TEST(CopyPagesPeer, pushes_to_and_pulls_from_memory_with_peer_access) { expect_copies_with_peer(memory_by_peer_access); }
TEST(CopyPagesPeer, pushes_to_and_pulls_from_another_process_by_ipc_handle) { expect_copies_with_peer(memory_by_ipc_handle); }
TEST(CopyPagesPeer, pushes_to_and_pulls_from_another_process_by_descriptor) { expect_copies_with_peer(memory_by_descriptor); }

}  // namespace
}  // namespace needle::testing

// Instead of gtest_main's: this program is also the other process.
int main(int argc, char** argv) {
  if (needle::testing::own_gpu_memory(argc, argv)) return 0;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
