// Names of full pages: what makes two sequences share a prefix.
//
// A page's name is a chained hash at its end: SHA-256 over (name of the page before, or the namespace; the page's token
// ids), cut to 128 bits. Engines that hash blocks themselves pass their own hashes through name_of_engine_hash(), so that
// both agree on what is shared; a block may be any divisor of the page, the hash at the page's end names it.
//
// What must stay true:
//  1. Equal names mean equal token prefixes in an equal namespace: model, revision, format fingerprint and tenant salt
//     are hashed first. "Same tokens, other layout" is never the same name.
//  2. Partial pages have no name.
//  3. The name zero ("unnamed") is never produced.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace needle::client {

struct PageName {
  uint64_t high = 0;
  uint64_t low = 0;
  friend constexpr bool operator==(const PageName&, const PageName&) = default;
};

struct NameSpace {
  std::string model;
  std::string revision;
  uint64_t format_fingerprint = 0;  // format_set_fingerprint()
  std::string tenant_salt;          // keeps tenants' equal prompts apart
};

// One name a full page of `tokens`; the rest of the tokens is not named.
std::vector<PageName> name_pages(const NameSpace& space, std::span<const int32_t> tokens, int64_t tokens_per_page);

// For engines with block hashes of their own: `hash_at_page_end` is theirs, any length.
PageName name_of_engine_hash(const NameSpace& space, std::span<const uint8_t> hash_at_page_end);

}  // namespace needle::client
