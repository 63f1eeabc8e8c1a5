#include "server/pool/page_record.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace needle::server {
namespace {

// CRC-32C (Castagnoli, reflected 0x82F63B78), eight bytes a step ("slicing by 8", Kounavis and Berry, 2005): about 25 ns
// a record without any instruction that only some machines have.
constexpr uint32_t kPolynomial = 0x82F63B78u;

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t value = 0; value < 256; ++value) {
    uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][value] = crc;
  }
  for (size_t slice = 1; slice < 8; ++slice) {
    for (size_t value = 0; value < 256; ++value) {
      const uint32_t before = tables[slice - 1][value];
      tables[slice][value] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr auto kTables = make_tables();
constexpr size_t kRecordCrcBytes = offsetof(PageRecord, crc);

template <class Row>
uint32_t row_crc(const Row& row, uint64_t place) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&row, 1)).first(offsetof(Row, crc));
  return crc32c(static_cast<uint32_t>(place * 0x9E3779B97F4A7C15ull >> 32), bytes);
}

template <class Row>
std::optional<Row> read_row(const Metadata& metadata, int64_t offset, uint64_t place) {
  Row row;
  std::memcpy(&row, metadata.bytes().data() + offset, sizeof(Row));
  if (row.crc != row_crc(row, place)) return std::nullopt;
  return row;
}

int64_t slot_offset(int64_t slot) {
  return 2 * static_cast<int64_t>(sizeof(RegionHeader)) + slot * static_cast<int64_t>(sizeof(SessionSlot));
}

constexpr uint64_t kHeaderPlace = 1;
uint64_t slot_place(int64_t slot) { return 2 + static_cast<uint64_t>(slot); }

}  // namespace

uint32_t crc32c(uint32_t seed, std::span<const std::byte> bytes) {
  uint32_t crc = ~seed;
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    uint64_t chunk;
    std::memcpy(&chunk, bytes.data() + at, sizeof(chunk));
    chunk ^= crc;
    crc = 0;
    for (size_t slice = 0; slice < 8; ++slice) crc ^= kTables[7 - slice][(chunk >> (8 * slice)) & 0xFF];
  }
  for (; at < bytes.size(); ++at) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(bytes[at])) & 0xFF];
  }
  return ~crc;
}

RecordTable::RecordTable(Metadata& metadata, PoolId pool, int64_t offset, int64_t pages)
    : metadata_(&metadata), pool_(pool), base_(metadata.bytes().data()), words_offset_(offset), records_offset_(offset + pages * 8) {
  NEEDLE_CHECK(offset % 8 == 0, "words are written whole");
  NEEDLE_CHECK(offset + pages * kBytesPerPage <= static_cast<int64_t>(metadata.bytes().size()),
               "the metadata region is smaller than Core::metadata_bytes()");
}

PageRecord RecordTable::record(PageIndex page) const {
  PageRecord record;
  std::memcpy(&record, record_at(page), sizeof(record));
  return record;
}

PageName RecordTable::name(PageIndex page) const {
  PageName name;
  std::memcpy(&name, record_at(page) + offsetof(PageRecord, name), sizeof(name));
  return name;
}

PageId RecordTable::parent(PageIndex page) const {
  PageId parent;
  std::memcpy(&parent, record_at(page) + offsetof(PageRecord, parent), sizeof(parent));
  return parent;
}

uint32_t RecordTable::crc_of(PageIndex page, const PageRecord& record) const {
  // Seeded with the place, so that a record copied to another page's place is not whole there.
  const uint64_t place = (uint64_t{pool_.value()} << 32) | page.value();
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&record, 1)).first(kRecordCrcBytes);
  return crc32c(static_cast<uint32_t>(place * 0x9E3779B97F4A7C15ull >> 32), bytes);
}

bool RecordTable::intact(PageIndex page) const {
  const PageRecord found = record(page);
  return found.crc == crc_of(page, found);
}

void RecordTable::write_word(PageIndex page, Generation generation, PageState state) {
  const uint64_t value = (uint64_t{generation.value()} << 32) | static_cast<uint64_t>(state);
  metadata_->put(words_offset_ + int64_t{page.value()} * 8, std::as_bytes(std::span(&value, 1)));
}

void RecordTable::write_record(PageIndex page, PageRecord record) {
  record.crc = crc_of(page, record);
  metadata_->put(records_offset_ + int64_t{page.value()} * static_cast<int64_t>(sizeof(PageRecord)), std::as_bytes(std::span(&record, 1)));
}

bool RegionTable::is_blank() const {
  const std::span<const std::byte> head = metadata_->bytes().first(2 * sizeof(RegionHeader));
  return std::all_of(head.begin(), head.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::optional<RegionHeader> RegionTable::header() const {
  const std::optional<RegionHeader> first = read_row<RegionHeader>(*metadata_, 0, kHeaderPlace);
  return first.has_value() ? first : read_row<RegionHeader>(*metadata_, sizeof(RegionHeader), kHeaderPlace);
}

void RegionTable::write_header(RegionHeader header) {
  header.crc = row_crc(header, kHeaderPlace);
  metadata_->put(sizeof(RegionHeader), std::as_bytes(std::span(&header, 1)));
  metadata_->put(0, std::as_bytes(std::span(&header, 1)));
}

std::optional<SessionSlot> RegionTable::session(int64_t slot) const {
  std::optional<SessionSlot> found = read_row<SessionSlot>(*metadata_, slot_offset(slot), slot_place(slot));
  if (found.has_value() && found->session == 0) return std::nullopt;
  return found;
}

void RegionTable::write_session(int64_t slot, SessionSlot session) {
  NEEDLE_CHECK(slot >= 0 && slot < slots(), "the session slot is outside the region");
  session.crc = row_crc(session, slot_place(slot));
  metadata_->put(slot_offset(slot), std::as_bytes(std::span(&session, 1)));
}

void RegionTable::clear_session(int64_t slot) { write_session(slot, SessionSlot{}); }

}  // namespace needle::server
