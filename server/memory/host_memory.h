// Pool memory of the host: one memfd a chunk, mapped at its place in a reserved range of addresses.
//
// Owned by node; server/pool/memory.h is the door that the core uses, on the loop thread. A thread of its own does what
// may take long (allocating, zeroing, binding, unmapping) in the order it was asked. files() is safe from any thread.
//
// What must stay true:
//  1. A chunk is answered OK only when all of its pages exist: fallocate has succeeded, so a full machine is an error here
//     and never a SIGBUS later. Before that, the memory still available is compared, since the kernel would rather kill.
//  2. Page i of a pool lies at base + i x page_bytes, whatever chunks exist; absent chunks are PROT_NONE.
//  3. Every memfd is mode 0600, close-on-exec, sealed against shrinking, growing and further seals before anyone else sees
//     it; mappings are not inherited by a fork.
//  4. Readers get a descriptor that was opened again for reading: a mapping of it can't be made writable. (That stops
//     accidents always; a process of the same user can still reach the file through /proc. See SECURITY.md.)
//  5. A kept descriptor is used only when its size and seals are those of a chunk made here; else it is dropped, audibly.
//
// Huge pages: reserved 2 MiB pages first, then transparent ones, then plain; what was had is counted and said.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "base/mutex.h"
#include "server/memory/descriptor_store.h"
#include "server/memory/file_descriptor.h"
#include "server/pool/memory.h"
#include "server/pool/page_types.h"

namespace needle::server {

enum class HugePages : uint8_t { kOff, kTry, kRequire };
enum class PageBacking : uint8_t { kReserved2M = 0, kTransparent = 1, kPlain = 2 };
inline constexpr const char* kPageBackingNames[3] = {"reserved_2m", "transparent", "plain"};

struct HostMemoryOptions {
  HugePages huge_pages = HugePages::kTry;
  int64_t numa_node = -1;
  int64_t spare_bytes = int64_t{256} << 20;  // left to the rest of the machine by every allocation
};

// The descriptors of a chunk. Shared: the owner is the memory, the second owner a message on its way to a client, which
// may still be queued when the chunk is freed.
struct ChunkFiles {
  FileDescriptor read_write;
  FileDescriptor read_only;
  PageBacking backing = PageBacking::kPlain;
};

// The lesser of MemAvailable and the headroom of this process's cgroup (v2 or v1).
int64_t available_memory_bytes();

class HostMemory final : public Memory {
 public:
  // Called from the memory's thread, once a request.
  using Answer = std::function<void(PoolId, ChunkIndex, absl::Status)>;
  using Available = std::function<int64_t()>;

  // `shapes[i]` belongs to PoolId(i). `kept` are descriptors that survived; those of no chunk here are left in it.
  static absl::StatusOr<std::unique_ptr<HostMemory>> create(const HostMemoryOptions& options, const std::vector<PoolShape>& shapes,
                                                            DescriptorStore& store, std::vector<KeptDescriptor>& kept, Available available,
                                                            Answer answer, Log& log);
  ~HostMemory() override;

  bool chunk_present(PoolId pool, ChunkIndex chunk) const override;
  void allocate_chunk(PoolId pool, ChunkIndex chunk, int64_t bytes) override;
  void free_chunk(PoolId pool, ChunkIndex chunk) override;

  std::byte* base(PoolId pool) const { return pools_[pool.value()].base; }
  std::shared_ptr<const ChunkFiles> files(PoolId pool, ChunkIndex chunk) const;  // null when absent

  bool idle() const;  // everything that was asked for was answered
  int64_t chunks_with(PageBacking backing) const;
  std::string description() const;  // "16 chunks: 2 reserved_2m, 14 plain; not bound; keeper PATH"
  void keep_all() const;            // tells the store everything again, after it was replaced

 private:
  struct Place {
    PoolShape shape;
    std::byte* base = nullptr;
    std::vector<std::shared_ptr<const ChunkFiles>> chunks;  // guarded by mutex_, which a member of a member cannot name
  };
  struct Work {
    PoolId pool;
    ChunkIndex chunk;
    bool free = false;
  };

  HostMemory(const HostMemoryOptions& options, DescriptorStore& store, Available available, Answer answer, Log& log);
  absl::StatusOr<std::shared_ptr<ChunkFiles>> make_chunk(const Place& place, ChunkIndex chunk);
  absl::StatusOr<PageBacking> fill(int fd, const Place& place, ChunkIndex chunk, bool reserved_pages);
  absl::Status map_chunk(const Place& place, ChunkIndex chunk, int fd);
  void unmap_chunk(const Place& place, ChunkIndex chunk);
  bool adopt(PoolId pool, ChunkIndex chunk, FileDescriptor fd);
  void serve();

  const HostMemoryOptions options_;
  DescriptorStore& store_;
  const Available available_;
  const Answer answer_;
  Log& log_;
  std::vector<Place> pools_;  // shapes and bases are fixed after create()
  mutable Mutex mutex_;
  Condition wake_;
  std::deque<Work> work_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // the thread has work in hand
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool fell_back_ = false;  // the fall-back was logged; the memory's thread only
  std::thread thread_;
};

// The metadata region: one memfd, mapped for writing here and handed to clients for reading.
class MemfdMetadata final : public Metadata {
 public:
  // Takes a kept descriptor of exactly this size, else makes a new one (zeroed).
  static absl::StatusOr<std::unique_ptr<MemfdMetadata>> create(int64_t bytes, DescriptorStore& store, std::vector<KeptDescriptor>& kept,
                                                               Log& log);
  ~MemfdMetadata() override;

  std::span<const std::byte> bytes() const override { return {data_, static_cast<size_t>(bytes_)}; }
  void put(int64_t offset, std::span<const std::byte> value) override;

  int read_only_fd() const { return read_only_.get(); }
  bool survived() const { return survived_; }  // holds what an earlier daemon wrote
  int read_write_fd() const { return read_write_.get(); }

 private:
  MemfdMetadata(std::byte* data, int64_t bytes, FileDescriptor read_write, FileDescriptor read_only, bool survived)
      : data_(data), bytes_(bytes), read_write_(std::move(read_write)), read_only_(std::move(read_only)), survived_(survived) {}
  std::byte* data_;
  int64_t bytes_;
  FileDescriptor read_write_;
  FileDescriptor read_only_;
  bool survived_;
};

inline constexpr char kMetadataName[] = "metadata";
std::string chunk_name(PoolId pool, ChunkIndex chunk);  // "pool-3-chunk-7"

// A small zeroed memfd for a session's read counters: written by the client, read here.
struct SharedPage {
  FileDescriptor fd;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  SharedPage() = default;
  SharedPage(SharedPage&& other) noexcept : fd(std::move(other.fd)), data(std::exchange(other.data, nullptr)), bytes(other.bytes) {}
  SharedPage& operator=(SharedPage&&) = delete;
  ~SharedPage();
};
absl::StatusOr<SharedPage> make_shared_page(int64_t bytes);

}  // namespace needle::server
