#include "server/memory/host_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/reserved_range.h"
#include "base/units.h"
#include "proto/errors.h"
#include "server/daemon_options.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace needle::server {

namespace {

constexpr int64_t kHugePageBytes = 2 * kMiB;
constexpr int kChunkSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string first_line(const std::string& path) {
  std::ifstream stream(path);
  std::string line;
  std::getline(stream, line);
  return line;
}

std::string reason(int error) { return std::string(std::strerror(error)); }

// Opened again for reading through /proc: the descriptor's mode is part of the open, so no mapping of it can write.
absl::StatusOr<FileDescriptor> reopen_read_only(int fd) {
  FileDescriptor read_only(::open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only.is_open()) {
    return make_error(ErrorCode::kMemory, absl::StrCat("a memfd cannot be opened for reading: ", reason(errno), "; is /proc mounted?"));
  }
  return read_only;
}

absl::StatusOr<FileDescriptor> make_memfd(const std::string& name, int64_t bytes, unsigned flags) {
  FileDescriptor fd(static_cast<int>(::syscall(SYS_memfd_create, name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | flags)));
  if (!fd.is_open() || ::fchmod(fd.get(), 0600) != 0 || ::ftruncate(fd.get(), bytes) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, kChunkSeals) != 0) {
    return make_error(ErrorCode::kMemory, absl::StrCat("memfd of ", size_text(bytes), ": ", reason(errno)));
  }
  return fd;
}

bool transparent_huge_pages_on_memfd() {
  const std::string setting = first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  return setting.find("[never]") == std::string::npos && setting.find("[deny]") == std::string::npos && !setting.empty();
}

// mbind(2) by number: libnuma is not worth a dependency for one call. MPOL_BIND = 2.
int bind_to_node(void* address, int64_t bytes, int64_t node) {
  std::vector<unsigned long> mask(static_cast<size_t>(node) / 64 + 1, 0);
  mask[static_cast<size_t>(node) / 64] = 1ul << (static_cast<size_t>(node) % 64);
  return static_cast<int>(::syscall(SYS_mbind, address, bytes, 2, mask.data(), mask.size() * 64 + 1, 0));
}

}  // namespace

int64_t available_memory_bytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t kib = 0;
    if (words.size() >= 2 && words[0] == "MemAvailable:" && absl::SimpleAtoi(words[1], &kib)) available = kib * kKiB;
  }
  // The cgroup's limit may lie far below the machine's memory. Inactive page cache counts as free there too.
  std::ifstream cgroups("/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const bool v2 = parts[0] == "0" && parts[1].empty();
    if (!v2 && parts[1] != "memory") continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (const std::string& folder : {absl::StrCat(root, parts[2] == "/" ? "" : parts[2]), root}) {
      int64_t limit = 0;
      int64_t used = 0;
      if (!absl::SimpleAtoi(first_line(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes")), &limit) ||
          !absl::SimpleAtoi(first_line(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes")), &used)) {
        continue;
      }
      int64_t inactive = 0;
      std::ifstream stat(folder + "/memory.stat");
      for (std::string row; std::getline(stat, row);) {
        const std::vector<std::string> words = absl::StrSplit(row, ' ');
        if (words.size() == 2 && (words[0] == "inactive_file" || words[0] == "total_inactive_file")) {
          (void)absl::SimpleAtoi(words[1], &inactive);
        }
      }
      available = std::min(available, std::max<int64_t>(0, limit - used + inactive));
    }
  }
  return available;
}

std::string chunk_name(PoolId pool, ChunkIndex chunk) { return absl::StrCat("pool-", pool.value(), "-chunk-", chunk.value()); }

HostMemory::HostMemory(const HostMemoryOptions& options, DescriptorStore& store, Available available, Answer answer, Log& log)
    : options_(options), store_(store), available_(std::move(available)), answer_(std::move(answer)), log_(log) {}

absl::StatusOr<std::unique_ptr<HostMemory>> HostMemory::create(const HostMemoryOptions& options, const std::vector<PoolShape>& shapes,
                                                               DescriptorStore& store, std::vector<KeptDescriptor>& kept,
                                                               Available available, Answer answer, Log& log) {
  std::unique_ptr<HostMemory> memory(new HostMemory(options, store, std::move(available), std::move(answer), log));
  for (const PoolShape& shape : shapes) {
    Place place;
    place.shape = shape;
    if (shape.page_bytes > 0 && shape.chunks_max > 0) {
      const int64_t range = shape.chunk_bytes * shape.chunks_max;
      // Aligned to 2 MiB so that huge pages fit; the slack stays reserved.
      std::byte* address = reserve_range(static_cast<size_t>(range + kHugePageBytes));
      if (address == nullptr) {
        return make_error(ErrorCode::kMemory, absl::StrCat("an address range of ", size_text(range), " cannot be reserved: ", reason(errno),
                                                           "; lower memory.bytes_max or raise the limit of address space (ulimit -v)"));
      }
      place.base = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<int64_t>(address), kHugePageBytes));
      place.chunks.resize(static_cast<size_t>(shape.chunks_max));
    }
    memory->pools_.push_back(std::move(place));
  }
  for (KeptDescriptor& descriptor : kept) {
    for (size_t pool = 0; pool < memory->pools_.size(); ++pool) {
      for (size_t chunk = 0; chunk < memory->pools_[pool].chunks.size(); ++chunk) {
        const PoolId pool_id{static_cast<uint32_t>(pool)};
        const ChunkIndex index{static_cast<uint32_t>(chunk)};
        if (descriptor.fd.is_open() && descriptor.name == chunk_name(pool_id, index))
          memory->adopt(pool_id, index, std::move(descriptor.fd));
      }
    }
  }
  memory->thread_ = std::thread([raw = memory.get()] { raw->serve(); });
  return memory;
}

HostMemory::~HostMemory() {
  {
    MutexLock hold(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const Place& place : pools_) {
    if (place.base != nullptr) ::munmap(place.base, static_cast<size_t>(place.shape.chunk_bytes * place.shape.chunks_max));
  }
}

bool HostMemory::adopt(PoolId pool, ChunkIndex chunk, FileDescriptor fd) {
  Place& place = pools_[pool.value()];
  struct stat found {};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (::fstat(fd.get(), &found) != 0 || found.st_size != place.shape.chunk_bytes || seals < 0 || (seals & kChunkSeals) != kChunkSeals) {
    log_.write(LogLevel::kWarning, "kept_chunk_refused",
               {{"name", chunk_name(pool, chunk)},
                {"bytes", absl::StrCat(found.st_size)},
                {"wanted", absl::StrCat(place.shape.chunk_bytes)},
                {"seals", absl::StrCat(seals)}});
    store_.drop(chunk_name(pool, chunk));
    return false;
  }
  absl::StatusOr<FileDescriptor> read_only = reopen_read_only(fd.get());
  if (!read_only.ok() || !map_chunk(place, chunk, fd.get()).ok()) return false;
  auto files = std::make_shared<ChunkFiles>();
  files->backing = found.st_blksize == kHugePageBytes ? PageBacking::kReserved2M : PageBacking::kPlain;
  files->read_write = std::move(fd);
  files->read_only = *std::move(read_only);
  place.chunks[chunk.value()] = std::move(files);
  return true;
}

bool HostMemory::chunk_present(PoolId pool, ChunkIndex chunk) const { return files(pool, chunk) != nullptr; }

std::shared_ptr<const ChunkFiles> HostMemory::files(PoolId pool, ChunkIndex chunk) const {
  MutexLock hold(mutex_);
  if (pool.value() >= pools_.size() || chunk.value() >= pools_[pool.value()].chunks.size()) return nullptr;
  return pools_[pool.value()].chunks[chunk.value()];
}

void HostMemory::allocate_chunk(PoolId pool, ChunkIndex chunk, int64_t bytes) {
  NEEDLE_CHECK(pool.value() < pools_.size() && chunk.value() < pools_[pool.value()].chunks.size(), "a chunk outside the reserved range");
  NEEDLE_CHECK(bytes == pools_[pool.value()].shape.chunk_bytes, "chunks of a pool have one size");
  {
    MutexLock hold(mutex_);
    work_.push_back({pool, chunk, false});
  }
  wake_.notify_one();
}

void HostMemory::free_chunk(PoolId pool, ChunkIndex chunk) {
  {
    MutexLock hold(mutex_);
    pools_[pool.value()].chunks[chunk.value()] = nullptr;  // absent for everybody from now on
    work_.push_back({pool, chunk, true});
  }
  wake_.notify_one();
}

void HostMemory::serve() {
  for (;;) {
    Work work;
    {
      MutexLock hold(mutex_);
      busy_ = false;
      while (!stopping_ && work_.empty()) wake_.wait(mutex_);
      if (stopping_) return;
      work = work_.front();
      work_.pop_front();
      busy_ = true;
    }
    Place& place = pools_[work.pool.value()];
    if (work.free) {
      unmap_chunk(place, work.chunk);
      store_.drop(chunk_name(work.pool, work.chunk));
      continue;
    }
    absl::StatusOr<std::shared_ptr<ChunkFiles>> made = make_chunk(place, work.chunk);
    if (made.ok()) {
      store_.keep(chunk_name(work.pool, work.chunk), (*made)->read_write.get());
      MutexLock hold(mutex_);
      place.chunks[work.chunk.value()] = *std::move(made);
    } else {
      log_.write(LogLevel::kError, "chunk_allocation_failed",
                 {{"pool", absl::StrCat(work.pool.value())},
                  {"chunk", absl::StrCat(work.chunk.value())},
                  {"cause", std::string(made.status().message())}});
    }
    answer_(work.pool, work.chunk, made.status());
  }
}

absl::StatusOr<std::shared_ptr<ChunkFiles>> HostMemory::make_chunk(const Place& place, ChunkIndex chunk) {
  const int64_t bytes = place.shape.chunk_bytes;
  absl::Status refused = absl::OkStatus();
  for (const bool reserved_pages : {true, false}) {
    if (reserved_pages && (options_.huge_pages == HugePages::kOff || bytes % kHugePageBytes != 0)) continue;
    if (!reserved_pages) {
      const int64_t available = available_();
      if (available - bytes < options_.spare_bytes) {
        return make_error(ErrorCode::kMemory,
                          absl::StrCat("a chunk of ", size_text(bytes), " does not fit: ", available / kMiB, " MiB are available and ",
                                       options_.spare_bytes / kMiB, " MiB are left to the rest of the machine. Lower memory.bytes"));
      }
    }
    absl::StatusOr<FileDescriptor> fd = make_memfd("needle-chunk", bytes, reserved_pages ? MFD_HUGETLB : 0u);
    absl::StatusOr<PageBacking> backing =
        fd.ok() ? fill(fd->get(), place, chunk, reserved_pages) : absl::StatusOr<PageBacking>(fd.status());
    if (!backing.ok()) {
      refused = backing.status();
      unmap_chunk(place, chunk);
      if (reserved_pages) continue;  // none reserved on this machine, or all taken: plain pages next, said below
      return refused;
    }
    if (*backing == PageBacking::kPlain && options_.huge_pages == HugePages::kRequire) {
      unmap_chunk(place, chunk);
      return make_error(
          ErrorCode::kMemory,
          absl::StrCat("memory.huge_pages is `require` and there are none for a chunk of ", size_text(bytes), ": ",
                       std::string(refused.message()),
                       ". Reserve them (sysctl vm.nr_hugepages), enable transparent ones for shared memory, or choose `try`"));
    }
    if (*backing != PageBacking::kReserved2M && options_.huge_pages == HugePages::kTry && !fell_back_) {
      fell_back_ = true;
      log_.write(LogLevel::kWarning, "huge_pages_fall_back",
                 {{"had", kPageBackingNames[static_cast<int>(*backing)]},
                  {"cause", bytes % kHugePageBytes != 0 ? "chunk is no multiple of 2 MiB" : std::string(refused.message())}});
    }
    absl::StatusOr<FileDescriptor> read_only = reopen_read_only(fd->get());
    if (!read_only.ok()) {
      unmap_chunk(place, chunk);
      return read_only.status();
    }
    auto files = std::make_shared<ChunkFiles>();
    files->read_write = *std::move(fd);
    files->read_only = *std::move(read_only);
    files->backing = *backing;
    return files;
  }
  return refused;
}

// Maps, binds, asks for huge pages, and only then allocates: a policy set later moves nothing that exists.
absl::StatusOr<PageBacking> HostMemory::fill(int fd, const Place& place, ChunkIndex chunk, bool reserved_pages) {
  const int64_t bytes = place.shape.chunk_bytes;
  if (absl::Status status = map_chunk(place, chunk, fd); !status.ok()) return status;
  std::byte* address = place.base + int64_t{chunk.value()} * bytes;
  if (options_.numa_node >= 0 && bind_to_node(address, bytes, options_.numa_node) != 0) {
    return make_error(ErrorCode::kMemory, absl::StrCat("a chunk cannot be bound to NUMA node ", options_.numa_node, ": ", reason(errno),
                                                       "; see /sys/devices/system/node, or set memory.numa_node = -1"));
  }
  PageBacking backing = reserved_pages ? PageBacking::kReserved2M : PageBacking::kPlain;
  if (!reserved_pages && options_.huge_pages != HugePages::kOff && transparent_huge_pages_on_memfd() &&
      ::madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE) == 0 &&
      ::madvise(address, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0) {
    backing = PageBacking::kTransparent;
  }
  int result = 0;
  do {
    result = ::fallocate(fd, 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    return make_error(ErrorCode::kMemory,
                      absl::StrCat(size_text(bytes), reserved_pages ? " of reserved huge pages: " : " of memory: ", reason(errno)));
  }
  return backing;
}

absl::Status HostMemory::map_chunk(const Place& place, ChunkIndex chunk, int fd) {
  const int64_t bytes = place.shape.chunk_bytes;
  std::byte* address = place.base + int64_t{chunk.value()} * bytes;
  if (!fill_range(address, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, fd)) {
    return make_error(ErrorCode::kMemory, absl::StrCat("a chunk of ", size_text(bytes), " cannot be mapped: ", reason(errno)));
  }
  return absl::OkStatus();
}

void HostMemory::unmap_chunk(const Place& place, ChunkIndex chunk) {
  const int64_t bytes = place.shape.chunk_bytes;
  empty_range(place.base + int64_t{chunk.value()} * bytes, static_cast<size_t>(bytes));
}

bool HostMemory::idle() const {
  MutexLock hold(mutex_);
  return work_.empty() && !busy_;
}

int64_t HostMemory::chunks_with(PageBacking backing) const {
  MutexLock hold(mutex_);
  int64_t count = 0;
  for (const Place& place : pools_) {
    for (const auto& files : place.chunks) count += files != nullptr && files->backing == backing ? 1 : 0;
  }
  return count;
}

void HostMemory::keep_all() const {
  std::vector<std::pair<std::string, std::shared_ptr<const ChunkFiles>>> all;
  {
    MutexLock hold(mutex_);
    for (size_t pool = 0; pool < pools_.size(); ++pool) {
      for (size_t chunk = 0; chunk < pools_[pool].chunks.size(); ++chunk) {
        if (pools_[pool].chunks[chunk] == nullptr) continue;
        all.emplace_back(chunk_name(PoolId(static_cast<uint32_t>(pool)), ChunkIndex(static_cast<uint32_t>(chunk))),
                         pools_[pool].chunks[chunk]);
      }
    }
  }
  for (const auto& [name, files] : all) store_.keep(name, files->read_write.get());
}

std::string HostMemory::description() const {
  std::string text;
  int64_t total = 0;
  for (int backing = 0; backing < 3; ++backing) {
    const int64_t count = chunks_with(static_cast<PageBacking>(backing));
    total += count;
    if (count > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", count, " ", kPageBackingNames[backing]);
  }
  return absl::StrCat(total, " chunks", text.empty() ? "" : ": ", text, "; ",
                      options_.numa_node >= 0 ? absl::StrCat("bound to NUMA node ", options_.numa_node) : "not bound", "; keeper ",
                      store_.kind());
}

absl::StatusOr<std::unique_ptr<MemfdMetadata>> MemfdMetadata::create(int64_t bytes, DescriptorStore& store,
                                                                     std::vector<KeptDescriptor>& kept, Log& log) {
  bytes = round_up(bytes, 4096);
  FileDescriptor read_write;
  bool survived = false;
  for (KeptDescriptor& descriptor : kept) {
    if (descriptor.name != kMetadataName || !descriptor.fd.is_open()) continue;
    struct stat found {};
    const int seals = ::fcntl(descriptor.fd.get(), F_GET_SEALS);
    if (::fstat(descriptor.fd.get(), &found) == 0 && found.st_size == bytes && seals >= 0 && (seals & kChunkSeals) == kChunkSeals) {
      read_write = std::move(descriptor.fd);
      survived = true;
    } else {
      log.write(LogLevel::kWarning, "kept_metadata_refused", {{"bytes", absl::StrCat(found.st_size)}, {"wanted", absl::StrCat(bytes)}});
      descriptor.fd.reset();
    }
  }
  if (!survived) {
    absl::StatusOr<FileDescriptor> fd = make_memfd("needle-metadata", bytes, 0);
    if (!fd.ok()) return fd.status();
    read_write = *std::move(fd);
    store.keep(kMetadataName, read_write.get());
  }
  absl::StatusOr<FileDescriptor> read_only = reopen_read_only(read_write.get());
  if (!read_only.ok()) return read_only.status();
  void* address = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, read_write.get(), 0);
  if (address == MAP_FAILED || ::madvise(address, static_cast<size_t>(bytes), MADV_DONTFORK) != 0) {
    return make_error(ErrorCode::kMemory, absl::StrCat("the metadata region of ", size_text(bytes), " cannot be mapped: ", reason(errno)));
  }
  return std::unique_ptr<MemfdMetadata>(
      new MemfdMetadata(static_cast<std::byte*>(address), bytes, std::move(read_write), *std::move(read_only), survived));
}

MemfdMetadata::~MemfdMetadata() { ::munmap(data_, static_cast<size_t>(bytes_)); }

void MemfdMetadata::put(int64_t offset, std::span<const std::byte> value) {
  NEEDLE_CHECK(offset >= 0 && offset % 8 == 0 && value.size() % 8 == 0 && offset + static_cast<int64_t>(value.size()) <= bytes_,
               "a put lies inside the region, on 8 bytes");
  // Release stores of 8 bytes: never torn for a reader, and in this order both for readers and for a kill between two.
  for (size_t at = 0; at < value.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, value.data() + at, 8);
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(data_ + offset + at)).store(word, std::memory_order_release);
  }
}

SharedPage::~SharedPage() {
  if (data != nullptr) ::munmap(data, static_cast<size_t>(bytes));
}

absl::StatusOr<SharedPage> make_shared_page(int64_t bytes) {
  absl::StatusOr<FileDescriptor> fd = make_memfd("needle-counters", bytes, 0);
  if (!fd.ok()) return fd.status();
  if (::fallocate(fd->get(), 0, 0, bytes) != 0) return make_error(ErrorCode::kMemory, absl::StrCat("a counters page: ", reason(errno)));
  void* address = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
  if (address == MAP_FAILED) return make_error(ErrorCode::kMemory, absl::StrCat("a counters page: ", reason(errno)));
  ::madvise(address, static_cast<size_t>(bytes), MADV_DONTFORK);
  SharedPage page;
  page.fd = *std::move(fd);
  page.data = static_cast<std::byte*>(address);
  page.bytes = bytes;
  return page;
}

}  // namespace needle::server
