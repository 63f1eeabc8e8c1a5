// The attach socket's messages, as both ends see them: plain structs, versioned, little-endian, one message a datagram.
//
// The socket is SOCK_SEQPACKET, so a message arrives whole or not at all, and descriptors arrive with the message that
// speaks of them. Conversation, with the client on the left:
//
//   Hello(pool set, format texts, views, what it held before)  ->
//                                                              <-  Welcome(session, secret, layouts, format) + 2 descriptors
//                                                              <-  Chunks(pool, indices) + descriptors, as often as needed
//                                                              <-  Ready: everything present was sent
//   Heartbeat, every heartbeat_ms                              ->
//                                                              <-  Chunks: the pool grew
//                                                              <-  ChunkRetiring(pool, chunk)
//   ChunkUnmapped(pool, chunk), after the last launch's fence  ->
//                                                              <-  Revoked(cause): rights are gone, pages pinned
//   Acknowledge, after fence and unmap                         ->
//   Detach, clean end                                          ->  Answer to every message that carries a request number
//
// A refusal at any point is an Answer; after a refused Hello the daemon closes the socket.
//
// What must stay true:
//  1. Sizes of structs are asserted here; fields are only ever added at the end of a body under a higher version.
//  2. Lengths inside a message are checked against the datagram before they are used; a message that disagrees with itself
//     ends the connection, nothing is allocated for it.
//  3. At most kFdsPerMessageMax descriptors travel with a message (SCM_RIGHTS refuses 254 and more).
//  4. The secret is handed out once, here. It names the session's rights on every RPC (metadata kSecretMetadata).
//
// WIRE.md tells the same in prose. Callers must not trust a count before parse() accepted the datagram.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace needle::attach {

inline constexpr uint32_t kMagic = 0x6C64654Eu;  // "Nedl"
inline constexpr uint16_t kVersion = 2;          // 2: Hello says who is asking and from which epoch its held pages are
inline constexpr int kFdsPerMessageMax = 253;
// One datagram. Holds the longest format texts (3 x 4 KiB) and some thousands of held pages; far below the kernel's
// default socket buffer (208 KiB).
inline constexpr size_t kMessageBytesMax = 64 * 1024;
inline constexpr int kSecretBytes = 16;
inline constexpr int kPoolsPerSet = 3;
inline constexpr uint32_t kNameBytesMax = 256;
inline constexpr uint32_t kFormatBytesMax = 16 * 1024;
inline constexpr uint32_t kHeldPagesMax = 3072;

// gRPC metadata that carries the session's rights: decimal session id, and the 16 secret bytes.
inline constexpr char kSessionMetadata[] = "needle-session";
inline constexpr char kSecretMetadata[] = "needle-secret-bin";
// Trailing metadata of a refused RPC: the name in proto/errors.h, and the hint in milliseconds.
inline constexpr char kErrorMetadata[] = "needle-error";
inline constexpr char kRetryAfterMetadata[] = "needle-retry-after-ms";

// Where an instance's sockets lie: $XDG_RUNTIME_DIR/needle/INSTANCE, or /run/needle/INSTANCE where that variable is empty.
inline std::string runtime_dir(const std::string& xdg_runtime_dir, const std::string& instance) {
  return (xdg_runtime_dir.empty() ? "/run" : xdg_runtime_dir) + "/needle/" + instance;
}
inline constexpr char kAttachSocketName[] = "attach.sock";
inline constexpr char kGrpcSocketName[] = "grpc.sock";
inline constexpr char kKeeperSocketName[] = "keeper.sock";

enum class Type : uint16_t {
  kHello = 1,
  kHeartbeat = 2,
  kChunkUnmapped = 3,
  kAcknowledge = 4,
  kDetach = 5,

  kWelcome = 65,
  kChunks = 66,
  kReady = 67,
  kChunkRetiring = 68,
  kRevoked = 69,
  kAnswer = 70,
};

// Which mappings a client wants of every chunk. A decode engine holds both: it selects through the read-only one and
// stores through the other.
enum View : uint32_t { kReadOnlyView = 1, kReadWriteView = 2 };

struct Header {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  Type type = Type::kHello;
  uint32_t request = 0;     // repeated in the Answer; 0: no answer wanted
  uint32_t body_bytes = 0;  // everything after the header
};
static_assert(sizeof(Header) == 16);

struct PageRefWire {
  uint32_t pool = 0;
  uint32_t index = 0;
  uint32_t generation = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(PageRefWire) == 16);

// Followed by: PageRefWire[held_count], pool set's name, format text, client's name. An empty format text means "tell me
// yours": for tools that adapt to the daemon. An engine always sends its own, and any difference is refused.
struct Hello {
  uint64_t previous_session = 0;  // 0: a new process
  uint64_t instance = 0;          // random, the same in each Hello of one attached client: a session whose Welcome was lost
                                  // is known by it and ends
  uint64_t held_epoch = 0;        // of the pools that the held pages are of, from the last Welcome; 0: nothing was held
  uint64_t held_lease = 0;        // the client's id for the lease over what it held
  uint32_t views = 0;
  uint32_t held_count = 0;
  uint32_t pool_set_bytes = 0;
  uint32_t format_bytes = 0;
  uint32_t name_bytes = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Hello) == 56);

struct PoolWire {
  uint32_t pool = 0;
  uint32_t kind = 0;  // 0 paged, 1 window, 2 state
  uint64_t epoch = 0;
  int64_t page_bytes = 0;  // the stride; 0: this model has no such pool
  int64_t page_tokens = 0;
  int64_t chunk_bytes = 0;
  int64_t chunks_max = 0;      // reserve chunks_max x chunk_bytes of addresses; page i lies at base + i x page_bytes
  int64_t words_offset = 0;    // byte of the metadata mapping where this pool's page words begin
  int64_t page_count_max = 0;  // words there, one a page index
};
static_assert(sizeof(PoolWire) == 64);

// Descriptors: the metadata region (read only), the session's read counters (proto/read_counters.h, read and write).
// Followed by: PoolWire[kPoolsPerSet], PageRefWire[held_count], format text, gRPC target, node's name, build text.
struct Welcome {
  uint64_t session = 0;
  uint64_t incarnation = 0;
  uint8_t secret[kSecretBytes] = {};
  uint64_t held_lease = 0;  // 0 when nothing held is still good
  int64_t metadata_bytes = 0;
  int64_t counters_bytes = 0;
  uint32_t heartbeat_ms = 0;
  uint32_t pool_set = 0;
  uint32_t held_count = 0;
  uint32_t format_bytes = 0;
  uint32_t target_bytes = 0;
  uint32_t node_bytes = 0;
  uint32_t build_bytes = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Welcome) == 88);

// Followed by uint32_t chunk indices[count]. Descriptors in the same order; with both views, each chunk's read-only
// descriptor comes right before its read-write one.
struct Chunks {
  uint32_t pool = 0;
  uint32_t count = 0;
};
static_assert(sizeof(Chunks) == 8);

struct Ready {
  uint32_t chunks = 0;  // sent since Welcome
  uint32_t reserved = 0;
};
static_assert(sizeof(Ready) == 8);

struct ChunkName {  // ChunkUnmapped and ChunkRetiring
  uint32_t pool = 0;
  uint32_t chunk = 0;
};
static_assert(sizeof(ChunkName) == 8);

struct Revoked {  // followed by the cause
  uint32_t cause_bytes = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Revoked) == 8);

struct Answer {  // followed by the message. status 0 is OK; `error` indexes kErrorTable, kNoError when there is none
  uint32_t status = 0;
  uint32_t error = 0xFFFFFFFFu;
  uint64_t retry_after_ms = 0;
  uint32_t message_bytes = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Answer) == 24);
inline constexpr uint32_t kNoError = 0xFFFFFFFFu;

// A page word in the metadata region, written by the daemon with one 8-byte store: a reader that sees another generation
// than its handle's, or a state other than sealed (2), holds a stale handle. server/pool/page_record.h owns the layout.
constexpr uint32_t page_word_generation(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
constexpr uint32_t page_word_state(uint64_t word) { return static_cast<uint32_t>(word & 3u); }
inline constexpr uint32_t kPageWordSealed = 2;

// Takes fixed-size bodies and tails off a datagram, refusing to run past its end.
class Reader {
 public:
  Reader(const std::byte* data, size_t size) : data_(data), left_(size) {}

  template <class Body>
  bool take(Body& body) {
    static_assert(std::is_trivially_copyable_v<Body>);
    if (left_ < sizeof(Body)) return false;
    std::memcpy(&body, data_, sizeof(Body));
    data_ += sizeof(Body);
    left_ -= sizeof(Body);
    return true;
  }
  // A run of bytes inside the datagram; null when it isn't there.
  const std::byte* take_bytes(size_t size) {
    if (left_ < size) return nullptr;
    const std::byte* run = data_;
    data_ += size;
    left_ -= size;
    return run;
  }
  size_t left() const { return left_; }

 private:
  const std::byte* data_;
  size_t left_;
};

}  // namespace needle::attach
