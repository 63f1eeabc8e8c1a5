// What simulated pages contain: bytes that say whose they are, so that any mix-up is seen by whoever reads them.
//
// A page has two layers, each a row of 32-byte stamps (content, layer, position, generation, writer). `content` names what
// the page holds: for a full page its name, for the rest a hash of the prefix and the place. Two writers of one prefix
// write equal content and position; generation and writer tell who wrote and when.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "server/pool/page_types.h"

namespace needle::sim {

using server::PageName;

inline uint64_t mix(uint64_t a, uint64_t b) { return Rng(a * 0x9E3779B97F4A7C15ull ^ b).next(); }

inline constexpr int kLayers = 2;

struct Stamp {
  uint64_t content = 0;
  uint32_t layer = 0;
  uint32_t position = 0;
  uint32_t generation = 0;
  uint32_t unused = 0;
  uint64_t sequence = 0;
  friend bool operator==(const Stamp&, const Stamp&) = default;
};
static_assert(sizeof(Stamp) == 32);

inline void fill_page(std::span<std::byte> page, uint64_t content, uint32_t position, uint32_t generation, uint64_t sequence) {
  const size_t stamps = page.size() / sizeof(Stamp);
  for (size_t i = 0; i < stamps; ++i) {
    const Stamp stamp{content, static_cast<uint32_t>(i * kLayers / stamps), position, generation, 0, sequence};
    std::memcpy(page.data() + i * sizeof(Stamp), &stamp, sizeof(stamp));
  }
  std::memset(page.data() + stamps * sizeof(Stamp), 0, page.size() - stamps * sizeof(Stamp));
}

// Empty when the page holds exactly this content at this position, written by one writer in one generation.
inline std::string what_is_wrong(std::span<const std::byte> page, uint64_t content, uint32_t position) {
  const size_t stamps = page.size() / sizeof(Stamp);
  Stamp first;
  std::memcpy(&first, page.data(), sizeof(first));
  for (size_t i = 0; i < stamps; ++i) {
    Stamp stamp;
    std::memcpy(&stamp, page.data() + i * sizeof(Stamp), sizeof(stamp));
    const Stamp wanted{content, static_cast<uint32_t>(i * kLayers / stamps), position, first.generation, 0, first.sequence};
    if (stamp == wanted) continue;
    return "stamp " + std::to_string(i) + " says content " + std::to_string(stamp.content) + " layer " + std::to_string(stamp.layer) +
           " position " + std::to_string(stamp.position) + " generation " + std::to_string(stamp.generation) + " of sequence " +
           std::to_string(stamp.sequence) + ", wanted content " + std::to_string(content) + " position " + std::to_string(position);
  }
  return {};
}

inline uint64_t checksum(std::span<const std::byte> page) {
  uint64_t sum = page.size();
  for (size_t at = 0; at + 8 <= page.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, page.data() + at, sizeof(word));
    sum = (sum ^ word) * 0x9FB21C651E98DF25ull;
    sum ^= sum >> 29;
  }
  return sum;
}

// A token stream: one segment id a page. Streams that share leading segments share those pages' names.
struct Story {
  std::vector<uint64_t> segments;

  // The prefix of `full` whole pages.
  PageName name(int64_t full) const {
    PageName name{1, 1};
    for (int64_t page = 0; page < full; ++page) {
      name = {mix(name.high, segments[static_cast<size_t>(page)]), mix(name.low + 7, segments[static_cast<size_t>(page)])};
    }
    return name;
  }
  std::vector<PageName> names(int64_t full) const {
    std::vector<PageName> all;
    for (int64_t page = 1; page <= full; ++page) all.push_back(name(page));
    return all;
  }
  // Content of the pages of a prefix of `tokens` tokens.
  uint64_t full_page(int64_t position) const { return name(position + 1).low; }
  uint64_t prefix(int64_t tokens, int64_t page_tokens) const {
    const int64_t full = tokens / page_tokens;
    const uint64_t tail = tokens % page_tokens == 0 ? 0 : segments[static_cast<size_t>(full)];
    return mix(mix(name(full).low, tail), static_cast<uint64_t>(tokens));
  }
  uint64_t partial_page(int64_t tokens, int64_t page_tokens) const { return mix(prefix(tokens, page_tokens), 1); }
  uint64_t window_page(int64_t tokens, int64_t page_tokens, int64_t block) const {
    return mix(prefix(tokens, page_tokens), 1000 + static_cast<uint64_t>(block));
  }
  uint64_t state_record(int64_t tokens, int64_t page_tokens) const { return mix(prefix(tokens, page_tokens), 2); }
};

}  // namespace needle::sim
