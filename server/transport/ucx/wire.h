// What readers and sources say to one another: the headers of UCX active messages.
//
// A *link* is one endpoint each way between a reader's and a source's worker, numbered by the reader; it ends whole.
//
//   reader → source   kHello   who reads, and whom it means. First on every link
//                     kFetch   send these pages under this (ticket, attempt, part)
//                     kCancel  forget what was not sent of it
//                     kPing    I live
//   source → reader   kWelcome who answers. Nothing is asked for before it
//                     kPage    a page, or a part of one
//                     kRefused a page that can't be had, and why
//                     kPong    I live
//                     kGoodbye I stop: the link ends, and that is no fault
//
// What must stay true:
//  1. Every struct is fixed-size, little-endian, without padding, and copied in and out with memcpy.
//  2. Nothing is believed: sizes, counts, pools and indices are checked by the receiver before they are used.
//  3. A receiver drops what names a link, ticket, attempt, part or position that it does not know, and counts it.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "base/ids.h"
#include "server/pool/page_types.h"
#include "server/transport/transport.h"

namespace needle::server::ucx {

inline constexpr uint32_t kWireVersion = 2;                     // 2: a listener's address instead of a worker's, kWelcome, kGoodbye
inline constexpr uint64_t kWireMagic = 0x78637564'6c65656eull;  // "needlucx" in bytes
static_assert(std::endian::native == std::endian::little, "headers are copied as they lie in memory");

enum MessageId : unsigned {
  kHello = 1,
  kFetch = 2,
  kCancel = 3,
  kPing = 4,
  kPage = 5,
  kRefused = 6,
  kPong = 7,
  kWelcome = 8,
  kGoodbye = 9
};

struct LinkName {
  uint64_t reader_instance = 0;  // random, of the reader's transport
  uint64_t number = 0;           // counted by the reader
  friend constexpr auto operator<=>(const LinkName&, const LinkName&) = default;
};

struct HelloHeader {
  uint64_t magic = kWireMagic;
  uint32_t version = kWireVersion;
  uint32_t reader_node = 0;
  LinkName link;
  uint64_t source_instance = 0;  // the one the reader means; another may live at that address after a restart
};

struct WelcomeHeader {
  LinkName link;
  uint64_t source_instance = 0;  // the one that answers; a reader that meant another closes the link
};

struct FetchHeader {  // payload: WantedPage[]
  LinkName link;
  uint64_t ticket = 0;
  uint32_t attempt = 0;
  uint32_t part = 0;
};
struct WantedPage {
  uint32_t position = 0;  // in the reader's request
  uint32_t pool = 0;
  uint32_t index = 0;
  uint32_t generation = 0;  // told for the log; generations are the core's to check, after the last byte
};
inline constexpr int64_t kWantedPagesMax = 64;  // a message; one request may take several

struct CancelHeader {
  LinkName link;
  uint64_t ticket = 0;
  uint32_t attempt = 0;
  uint32_t part = 0;
};

struct PageHeader {  // payload: bytes [offset, offset + payload) of the page
  LinkName link;
  uint64_t ticket = 0;
  uint32_t attempt = 0;
  uint32_t part = 0;
  uint64_t offset = 0;
  uint32_t position = 0;
  uint32_t reserved = 0;
};

enum class RefusalCause : uint32_t { kUnknownPage = 1, kChunkReleased = 2, kQueueFull = 3 };
struct RefusedHeader {
  LinkName link;
  uint64_t ticket = 0;
  uint32_t attempt = 0;
  uint32_t part = 0;
  uint32_t position = 0;
  uint32_t cause = 0;
};

struct LifeHeader {  // kPing, kPong, kGoodbye
  LinkName link;
};

static_assert(sizeof(HelloHeader) == 40 && sizeof(FetchHeader) == 32 && sizeof(WantedPage) == 16);
static_assert(sizeof(CancelHeader) == 32 && sizeof(PageHeader) == 48 && sizeof(RefusedHeader) == 40);
static_assert(sizeof(LifeHeader) == 16 && sizeof(WelcomeHeader) == 24 && std::has_unique_object_representations_v<PageHeader>);

// What a peer needs to reach a registered chunk: kept in ChunkDescriptor::descriptor, the packed remote key behind it.
struct ChunkGeometry {
  uint32_t version = kWireVersion;
  uint32_t reserved = 0;
  uint64_t address = 0;     // of the chunk's first byte in the source's address space
  uint64_t first_byte = 0;  // of the chunk in its pool's range
  uint64_t bytes = 0;
  uint64_t page_bytes = 0;
};
static_assert(sizeof(ChunkGeometry) == 40);

// What membership hands from daemon to daemon: this, then `socket_bytes` of a sockaddr.
struct AddressHeader {
  uint64_t magic = kWireMagic;
  uint32_t version = kWireVersion;
  uint32_t socket_bytes = 0;
  uint64_t instance = 0;
};
static_assert(sizeof(AddressHeader) == 24);

}  // namespace needle::server::ucx
