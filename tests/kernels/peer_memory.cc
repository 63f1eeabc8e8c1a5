#include "tests/kernels/peer_memory.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "base/check.h"
#include "tests/kernels/device_array.h"

namespace needle::testing {
namespace {

constexpr const char* kOwnMemory = "--own-gpu-memory";
constexpr const char* kByIpcHandle = "ipc-handle";
constexpr const char* kByDescriptor = "descriptor";

// A function of the driver, which nothing here links.
template <class Function>
Function* driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  must_cuda(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
  NEEDLE_CHECK(result == cudaDriverEntryPointSuccess, name);
  return reinterpret_cast<Function*>(found);
}
#define NEEDLE_DRIVER(name) driver<decltype(name)>(#name)

void must_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  NEEDLE_DRIVER(cuGetErrorString)(result, &text);
  NEEDLE_CHECK(false, (std::string(what) + ": " + (text == nullptr ? "?" : text)).c_str());
}

// A mapping of a chunk of physical memory, for one GPU to read and write.
class Chunk {
 public:
  static CUmemAllocationProp on(int device) {
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return kind;
  }
  static size_t rounded(int64_t bytes, int device) {
    const CUmemAllocationProp kind = on(device);
    size_t step = 0;
    must_driver(NEEDLE_DRIVER(cuMemGetAllocationGranularity)(&step, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "granularity");
    return (static_cast<size_t>(bytes) + step - 1) / step * step;
  }

  Chunk(CUmemGenericAllocationHandle handle, size_t bytes, int reader) : handle_(handle), bytes_(bytes) {
    must_driver(NEEDLE_DRIVER(cuMemAddressReserve)(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
    must_driver(NEEDLE_DRIVER(cuMemMap)(address_, bytes_, 0, handle_, 0), "cuMemMap");
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, reader};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    must_driver(NEEDLE_DRIVER(cuMemSetAccess)(address_, bytes_, &access, 1), "cuMemSetAccess");
  }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  ~Chunk() {
    must_driver(NEEDLE_DRIVER(cuMemUnmap)(address_, bytes_), "cuMemUnmap");
    must_driver(NEEDLE_DRIVER(cuMemRelease)(handle_), "cuMemRelease");
    must_driver(NEEDLE_DRIVER(cuMemAddressFree)(address_, bytes_), "cuMemAddressFree");
  }
  std::byte* base() const { return reinterpret_cast<std::byte*>(address_); }

 private:
  CUmemGenericAllocationHandle handle_;
  size_t bytes_;
  CUdeviceptr address_ = 0;
};

void use(int device) {
  must_cuda(cudaSetDevice(device));
  must_cuda(cudaFree(nullptr));  // the driver's calls need the context
}

// Whole messages over a stream socket. False: the other end is gone.
bool send_all(int socket, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t sent = ::send(socket, static_cast<const char*>(from) + done, bytes - done, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    done += static_cast<size_t>(sent);
  }
  return true;
}
bool receive_all(int socket, void* to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t received = ::recv(socket, static_cast<char*>(to) + done, bytes - done, 0);
    if (received <= 0) return false;
    done += static_cast<size_t>(received);
  }
  return true;
}

// A byte and a descriptor, or its receipt.
class DescriptorMessage {
 public:
  DescriptorMessage() {
    message_.msg_iov = &part_;
    message_.msg_iovlen = 1;
    message_.msg_control = control_;
    message_.msg_controllen = sizeof(control_);
  }
  bool send(int socket, int descriptor) {
    cmsghdr* header = CMSG_FIRSTHDR(&message_);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    return ::sendmsg(socket, &message_, MSG_NOSIGNAL) == 1;
  }
  int receive(int socket) {
    int descriptor = -1;
    if (::recvmsg(socket, &message_, MSG_CMSG_CLOEXEC) != 1) return -1;
    const cmsghdr* header = CMSG_FIRSTHDR(&message_);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    return descriptor;
  }

 private:
  char byte_ = 0;
  iovec part_{&byte_, 1};
  alignas(cmsghdr) char control_[CMSG_SPACE(sizeof(int))] = {};
  msghdr message_{};
};

// What the owner is asked to do: one byte, then how many bytes, then (to write) these.
constexpr char kWrite = 'w';
constexpr char kRead = 'r';

// Until the other end is gone.
void serve(int socket, std::byte* memory) {
  std::vector<std::byte> bytes;
  char verb = 0;
  uint64_t count = 0;
  while (receive_all(socket, &verb, 1) && receive_all(socket, &count, sizeof(count))) {
    bytes.resize(count);
    if (verb == kWrite) {
      if (!receive_all(socket, bytes.data(), count)) return;
      must_cuda(cudaMemcpy(memory, bytes.data(), count, cudaMemcpyHostToDevice));
      must_cuda(cudaDeviceSynchronize());  // the copy returns when the bytes are staged, and the other process writes beside them
      if (!send_all(socket, &verb, 1)) return;
    } else {
      must_cuda(cudaMemcpy(bytes.data(), memory, count, cudaMemcpyDeviceToHost));
      if (!send_all(socket, bytes.data(), count)) return;
    }
  }
}

void own_by_ipc_handle(int socket, int64_t bytes) {
  void* memory = nullptr;
  must_cuda(cudaMalloc(&memory, static_cast<size_t>(bytes)));
  cudaIpcMemHandle_t handle{};
  must_cuda(cudaIpcGetMemHandle(&handle, memory));
  if (send_all(socket, &handle, sizeof(handle))) serve(socket, static_cast<std::byte*>(memory));
  must_cuda(cudaFree(memory));
}

void own_by_descriptor(int socket, int device, int64_t bytes) {
  const CUmemAllocationProp kind = Chunk::on(device);
  const size_t rounded = Chunk::rounded(bytes, device);
  CUmemGenericAllocationHandle handle = 0;
  must_driver(NEEDLE_DRIVER(cuMemCreate)(&handle, rounded, &kind, 0), "cuMemCreate");
  const Chunk chunk(handle, rounded, device);
  int descriptor = -1;
  must_driver(NEEDLE_DRIVER(cuMemExportToShareableHandle)(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "export");
  const bool sent = DescriptorMessage().send(socket, descriptor);
  ::close(descriptor);
  if (sent) serve(socket, chunk.base());
}

class NeighbourMemory final : public PeerMemory {
 public:
  NeighbourMemory(const Peers& peers, int64_t bytes) : there_(peers.there) {
    must_cuda(cudaDeviceEnablePeerAccess(peers.there, 0));
    must_cuda(cudaSetDevice(peers.there));
    must_cuda(cudaMalloc(&memory_, static_cast<size_t>(bytes)));
    must_cuda(cudaSetDevice(peers.here));
  }
  ~NeighbourMemory() override {
    must_cuda(cudaFree(memory_));
    must_cuda(cudaDeviceDisablePeerAccess(there_));
  }
  std::byte* mapped() const override { return static_cast<std::byte*>(memory_); }
  void write(const std::vector<std::byte>& bytes) override {
    must_cuda(cudaMemcpy(memory_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  std::vector<std::byte> read(int64_t bytes) override {
    std::vector<std::byte> found(static_cast<size_t>(bytes));
    must_cuda(cudaMemcpy(found.data(), memory_, found.size(), cudaMemcpyDeviceToHost));
    return found;
  }

 private:
  int there_;
  void* memory_ = nullptr;
};

// This program again, with one end of a socket.
class Owner {
 public:
  Owner(const char* how, int device, int64_t bytes) {
    int ends[2];
    NEEDLE_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
    socket_ = ends[0];
    std::string program = "/proc/self/exe", flag = kOwnMemory, way = how, on = std::to_string(device), size = std::to_string(bytes);
    char* arguments[] = {program.data(), flag.data(), way.data(), on.data(), size.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
    NEEDLE_CHECK(posix_spawn(&process_, program.c_str(), &actions, nullptr, arguments, environ) == 0, "the owner does not start");
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    ::close(socket_);
    int status = 0;
    NEEDLE_CHECK(::waitpid(process_, &status, 0) == process_ && status == 0, "the owner of the memory failed");
  }
  int socket() const { return socket_; }

  void write(const std::vector<std::byte>& bytes) {
    char answer = 0;
    ask(kWrite, bytes.size());
    NEEDLE_CHECK(send_all(socket_, bytes.data(), bytes.size()) && receive_all(socket_, &answer, 1), "the owner is gone");
  }
  std::vector<std::byte> read(int64_t bytes) {
    std::vector<std::byte> found(static_cast<size_t>(bytes));
    ask(kRead, found.size());
    NEEDLE_CHECK(receive_all(socket_, found.data(), found.size()), "the owner is gone");
    return found;
  }

 private:
  void ask(char verb, uint64_t count) {
    NEEDLE_CHECK(send_all(socket_, &verb, 1) && send_all(socket_, &count, sizeof(count)), "the owner is gone");
  }

  int socket_ = -1;
  pid_t process_ = -1;
};

// Let go of before its owner ends.
class IpcMapping {
 public:
  explicit IpcMapping(const Owner& owner) {
    cudaIpcMemHandle_t handle{};
    NEEDLE_CHECK(receive_all(owner.socket(), &handle, sizeof(handle)), "no handle from the owner");
    must_cuda(cudaIpcOpenMemHandle(&memory_, handle, cudaIpcMemLazyEnablePeerAccess));
  }
  IpcMapping(const IpcMapping&) = delete;
  IpcMapping& operator=(const IpcMapping&) = delete;
  ~IpcMapping() { must_cuda(cudaIpcCloseMemHandle(memory_)); }
  std::byte* base() const { return static_cast<std::byte*>(memory_); }

 private:
  void* memory_ = nullptr;
};

class ForeignIpcMemory final : public PeerMemory {
 public:
  ForeignIpcMemory(const Peers& peers, int64_t bytes) : owner_(kByIpcHandle, peers.there, bytes), mapping_(owner_) {}
  std::byte* mapped() const override { return mapping_.base(); }
  void write(const std::vector<std::byte>& bytes) override { owner_.write(bytes); }
  std::vector<std::byte> read(int64_t bytes) override { return owner_.read(bytes); }

 private:
  Owner owner_;
  IpcMapping mapping_;
};

CUmemGenericAllocationHandle imported(const Owner& owner) {
  const int descriptor = DescriptorMessage().receive(owner.socket());
  NEEDLE_CHECK(descriptor >= 0, "no descriptor from the owner");
  CUmemGenericAllocationHandle handle = 0;
  void* as_pointer = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  must_driver(NEEDLE_DRIVER(cuMemImportFromShareableHandle)(&handle, as_pointer, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), "import");
  ::close(descriptor);
  return handle;
}

class ForeignChunkMemory final : public PeerMemory {
 public:
  ForeignChunkMemory(const Peers& peers, int64_t bytes)
      : owner_(kByDescriptor, peers.there, bytes), chunk_(imported(owner_), Chunk::rounded(bytes, peers.there), peers.here) {}
  std::byte* mapped() const override { return chunk_.base(); }
  void write(const std::vector<std::byte>& bytes) override { owner_.write(bytes); }
  std::vector<std::byte> read(int64_t bytes) override { return owner_.read(bytes); }

 private:
  Owner owner_;
  Chunk chunk_;
};

}  // namespace

FoundPeers find_peers() {
  FoundPeers found;
  found.none_because = no_gpu_because();
  if (!found.none_because.empty()) return found;
  int count = 0;
  must_cuda(cudaGetDeviceCount(&count));
  must_cuda(cudaGetDevice(&found.peers.here));
  for (int there = 0; there < count; ++there) {
    int reaches = 0;
    if (there != found.peers.here) must_cuda(cudaDeviceCanAccessPeer(&reaches, found.peers.here, there));
    if (reaches == 0) continue;
    found.peers.there = there;
    return found;
  }
  found.none_because = count < 2 ? "one GPU: there is no peer" : "no GPU whose memory the current one reaches";
  return found;
}

std::unique_ptr<PeerMemory> memory_by_peer_access(const Peers& peers, int64_t bytes) {
  use(peers.here);
  return std::make_unique<NeighbourMemory>(peers, bytes);
}
std::unique_ptr<PeerMemory> memory_by_ipc_handle(const Peers& peers, int64_t bytes) {
  use(peers.here);
  return std::make_unique<ForeignIpcMemory>(peers, bytes);
}
std::unique_ptr<PeerMemory> memory_by_descriptor(const Peers& peers, int64_t bytes) {
  use(peers.here);
  return std::make_unique<ForeignChunkMemory>(peers, bytes);
}

bool own_gpu_memory(int argc, char** argv) {
  if (argc != 5 || std::strcmp(argv[1], kOwnMemory) != 0) return false;
  const int device = std::stoi(argv[3]);
  const int64_t bytes = std::stoll(argv[4]);
  use(device);
  if (std::strcmp(argv[2], kByIpcHandle) == 0) {
    own_by_ipc_handle(STDIN_FILENO, bytes);
  } else {
    own_by_descriptor(STDIN_FILENO, device, bytes);
  }
  return true;
}

}  // namespace needle::testing
