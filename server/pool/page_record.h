// What a page leaves in the metadata region, and the order in which it is written there.
//
// The region: two copies of a header, the session slots, then for each pool an array of words and an array of records.
//   word    8 bytes, written whole: generation << 32 | state. Mapped read-only by clients: a reader checks it without a call.
//   record  56 bytes: name, sequence, checksum, generation, parent, tokens, owner, role, CRC over it all and its place.
//
// What must stay true, for a kill between any two writes and for a torn record:
//  1. reserve: record(open, generation + 1), then word(reserved, generation + 1), then the page is handed out.
//     reopen:  word(draining), then as reserve.
//  2. seal:    record(role, name, checksum, generation), then word(sealed, generation). `sealed` is written last, so a
//     sealed word always stands beside a whole record of the same generation.
//  3. A set (a sequence's partial page, window and state; a resume point's window and state) is sealed member by member,
//     its state page last. That page is the commit record; a set without it, or with a member missing, never was.
//     A set is undone in the reverse order: its commit first.
//  4. Generations only grow. A page that is found in any doubt comes back under its word's generation and is never readable.
//  5. The header is written to its second place, then to its first: one of the two is whole at any moment after the first
//     start. Without it nobody would know who may still touch which page.
//  6. There is one session slot more than sessions: a process that attaches anew has two for a moment.
//
// Owner: Pool, on the loop thread. Callers must not keep a pointer into a record across a write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "base/ids.h"
#include "server/pool/memory.h"
#include "server/pool/page_types.h"

namespace needle::server {

enum class PageRole : uint16_t {
  kOpen = 0,            // reserved, nothing published
  kNamed = 1,           // a full page in the prefix tree
  kSequenceMember = 2,  // partial page or window page of a sealed sequence
  kSequenceCommit = 3,  // its state page
  kResumeMember = 4,
  kResumeCommit = 5,
};

inline constexpr uint16_t kOwnerDaemon = 0xFFFF;  // not a client's: reserved by a ship
inline constexpr uint16_t kPartialOrdinal = 4095;

struct PageRecord {
  PageName name;          // kNamed: its own; sets: that of the last full page below, or none
  SequenceId sequence;    // who wrote it; sets: whose it is
  uint64_t checksum = 0;  // of the page's bytes, all of the stride
  Generation generation;
  PageId parent;                  // kNamed: the page before; sets: the last full page below; none at token 0
  uint32_t tokens_end = 0;        // tokens of the sequence up to the end of this page's content
  uint16_t owner = kOwnerDaemon;  // session slot, while reserved
  uint16_t role_bits = 0;         // role | ordinal << 4 (member: its place; commit: how many window members)
  uint32_t crc = 0;               // CRC-32C of the bytes above and of (pool, page index)

  PageRole role() const { return static_cast<PageRole>(role_bits & 15); }
  uint16_t ordinal() const { return static_cast<uint16_t>(role_bits >> 4); }
  static constexpr uint16_t bits(PageRole role, uint16_t ordinal = 0) {
    return static_cast<uint16_t>(static_cast<uint16_t>(role) | (ordinal << 4));
  }
};
static_assert(sizeof(PageRecord) == 56, "records lie in the metadata region: a change of size is a change of layout");
static_assert(std::is_trivially_copyable_v<PageRecord>);

uint32_t crc32c(uint32_t seed, std::span<const std::byte> bytes);

// Words and records of one pool.
class RecordTable {
 public:
  static constexpr int64_t kBytesPerPage = static_cast<int64_t>(sizeof(uint64_t) + sizeof(PageRecord));

  RecordTable(Metadata& metadata, PoolId pool, int64_t offset, int64_t pages);

  PageState state(PageIndex page) const { return static_cast<PageState>(word(page) & 3); }
  Generation generation(PageIndex page) const { return Generation(static_cast<uint32_t>(word(page) >> 32)); }
  PageRecord record(PageIndex page) const;
  PageName name(PageIndex page) const;
  PageId parent(PageIndex page) const;
  bool intact(PageIndex page) const;  // the record's CRC holds

  void write_word(PageIndex page, Generation generation, PageState state);
  void write_record(PageIndex page, PageRecord record);  // fills in the CRC

 private:
  uint64_t word(PageIndex page) const {
    uint64_t value = 0;
    std::memcpy(&value, &base_[words_offset_ + int64_t{page.value()} * 8], sizeof(value));
    return value;
  }
  const std::byte* record_at(PageIndex page) const {
    return &base_[records_offset_ + int64_t{page.value()} * static_cast<int64_t>(sizeof(PageRecord))];
  }
  uint32_t crc_of(PageIndex page, const PageRecord& record) const;

  Metadata* metadata_;
  PoolId pool_;
  const std::byte* base_;
  int64_t words_offset_;
  int64_t records_offset_;
};

// The first bytes of the region, twice.
struct RegionHeader {
  uint64_t magic = 0;
  uint64_t layout = 0;  // hash of pools, shapes, formats and this layout's version: differs -> the region is formatted anew
  uint64_t epoch = 0;
  uint64_t incarnation = 0;
  uint32_t unused = 0;
  uint32_t crc = 0;
};
static_assert(sizeof(RegionHeader) == 40);

// An attached process, so that a restarted daemon knows who may still touch memory.
struct SessionSlot {
  uint64_t session = 0;
  int64_t pid = 0;
  int64_t start_time_ticks = 0;
  uint64_t instance = 0;
  uint32_t set = 0;
  uint32_t crc = 0;
};
static_assert(sizeof(SessionSlot) == 40);

class RegionTable {
 public:
  RegionTable(Metadata& metadata, int64_t sessions_max) : metadata_(&metadata), sessions_max_(sessions_max) {}

  static int64_t bytes(int64_t sessions_max) {
    return 2 * static_cast<int64_t>(sizeof(RegionHeader)) + slots(sessions_max) * static_cast<int64_t>(sizeof(SessionSlot));
  }
  static int64_t slots(int64_t sessions_max) { return sessions_max + 1; }
  bool is_blank() const;                       // nothing was ever written
  std::optional<RegionHeader> header() const;  // absent when it was never whole
  void write_header(RegionHeader header);
  int64_t slots() const { return slots(sessions_max_); }
  std::optional<SessionSlot> session(int64_t slot) const;
  void write_session(int64_t slot, SessionSlot session);
  void clear_session(int64_t slot);

 private:
  Metadata* metadata_;
  int64_t sessions_max_;
};

}  // namespace needle::server
