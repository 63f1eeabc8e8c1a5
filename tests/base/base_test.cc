#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <unordered_set>
#include <vector>

#include "base/ids.h"
#include "base/log.h"
#include "base/reserved_range.h"
#include "base/rng.h"
#include "base/units.h"
#include "base/workers.h"

namespace needle {
namespace {

class ReservedRange : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = size_t{8} << 20;
  void SetUp() override { ASSERT_NE(range_, nullptr); }
  void TearDown() override { ::munmap(range_, 2 * kBytes); }
  // msync says ENOMEM where nothing is mapped, not even PROT_NONE.
  bool is_whole() const { return ::msync(range_, 2 * kBytes, MS_ASYNC) == 0; }

  std::byte* const range_ = reserve_range(2 * kBytes);
};

TEST_F(ReservedRange, a_file_that_cannot_be_mapped_leaves_no_hole) {
  const int fd = ::memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB);
  if (fd < 0) GTEST_SKIP() << "this kernel has no hugetlb files";
  ASSERT_EQ(::ftruncate(fd, int64_t{1} << 40), 0);
  constexpr size_t kMoreThanThereAre = size_t{1} << 40;  // of huge pages: the reservation fails
  std::byte* const wide = reserve_range(kMoreThanThereAre);
  ASSERT_NE(wide, nullptr);
  EXPECT_FALSE(fill_range(wide, kMoreThanThereAre, PROT_READ | PROT_WRITE, fd));
  EXPECT_EQ(::msync(wide, kBytes, MS_ASYNC), 0) << "another thread's mmap could take this place";
  ::munmap(wide, kMoreThanThereAre);
  ::close(fd);
}

TEST_F(ReservedRange, is_filled_and_emptied_piece_by_piece) {
  const int fd = ::memfd_create("piece", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, kBytes), 0);
  ASSERT_TRUE(fill_range(range_ + kBytes, kBytes, PROT_READ | PROT_WRITE, fd));
  range_[kBytes] = std::byte{7};
  EXPECT_TRUE(is_whole());
  empty_range(range_ + kBytes, kBytes);
  EXPECT_TRUE(is_whole());
  ASSERT_TRUE(fill_range(range_, kBytes, PROT_READ, fd));
  EXPECT_EQ(range_[0], std::byte{7});
  ::close(fd);
}

TEST(Ids, are_distinct_types_without_conversion) {
  static_assert(!std::is_convertible_v<PageIndex, uint32_t>);
  static_assert(!std::is_convertible_v<uint32_t, PageIndex>);
  static_assert(!std::is_convertible_v<PageIndex, ChunkIndex>);
  EXPECT_TRUE(PageIndex().is_none());
  EXPECT_FALSE(PageIndex(0).is_none());
  EXPECT_TRUE(TicketId(0).is_none());
  EXPECT_LT(PageIndex(3), PageIndex(4));
}

TEST(Rng, gives_the_published_splitmix64_numbers) {
  // The first outputs for seed 1234567, as in the public test vectors of SplitMix64.
  Rng rng(1234567);
  EXPECT_EQ(rng.next(), 6457827717110365317ull);
  EXPECT_EQ(rng.next(), 3203168211198807973ull);
  EXPECT_EQ(rng.next(), 9817491932198370423ull);
}

TEST(Rng, stays_inside_its_bounds) {
  Rng rng(1);
  std::unordered_set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(rng.below(7));
  EXPECT_EQ(seen.size(), 7u);
  for (int i = 0; i < 1000; ++i) {
    const int64_t draw = rng.between(-3, 3);
    EXPECT_GE(draw, -3);
    EXPECT_LE(draw, 3);
  }
}

TEST(Units, entries_are_visible_to_the_token_that_completes_them) {
  EXPECT_EQ(entries_complete(3, 4), 0);
  EXPECT_EQ(entries_complete(4, 4), 1);
  EXPECT_EQ(entries_complete(2051, 4), 512);  // selection is total up to here for k = 512
  EXPECT_EQ(entries_complete(2052, 4), 513);
  EXPECT_EQ(first_token_of_entry(5, 4), 20);
  EXPECT_EQ(round_up(1'164'864, 2304), 1'165'824);
}

TEST(Workers, call_every_index_once_and_never_overlap_a_worker) {
  for (int width : {1, 2, 5}) {
    WorkerThreads workers(width);
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{1000}}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
      std::vector<std::atomic<int>> inside(static_cast<size_t>(width));
      std::atomic<bool> overlapped{false};
      workers.run(count, [&](int64_t index, int worker) {
        if (inside[static_cast<size_t>(worker)].fetch_add(1) != 0) overlapped = true;
        calls[static_cast<size_t>(index)].fetch_add(1);
        inside[static_cast<size_t>(worker)].fetch_sub(1);
      });
      for (auto& c : calls) EXPECT_EQ(c.load(), 1);
      EXPECT_FALSE(overlapped.load());
    }
  }
}

std::string logged(const std::string& value) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* stream = ::open_memstream(&text, &size);
  StreamLog(stream, LogLevel::kInfo).write(LogLevel::kWarning, "event", {{"key", value}});
  std::fclose(stream);
  const std::string line(text, size);
  std::free(text);
  return line;
}

TEST(Log, a_line_is_one_line_of_printable_text_whatever_its_values_hold) {
  EXPECT_EQ(logged("plain"), "level=warning event=event key=plain\n");
  EXPECT_EQ(logged(""), "level=warning event=event key=\"\"\n");
  EXPECT_EQ(logged("two words"), "level=warning event=event key=\"two words\"\n");
  EXPECT_EQ(logged("say \"x\" \\ y"), "level=warning event=event key=\"say \\\"x\\\" \\\\ y\"\n");
  EXPECT_EQ(logged("a\nlevel=error"), "level=warning event=event key=\"a\\nlevel=error\"\n") << "no line is forged";
  EXPECT_EQ(logged("\x1b[31m\xff\r"), "level=warning event=event key=\"\\x1b[31m\\xff\\x0d\"\n") << "no terminal is steered";
  EXPECT_EQ(logged(std::string("\0\x7f", 2)), "level=warning event=event key=\"\\x00\\x7f\"\n");
}

}  // namespace
}  // namespace needle
