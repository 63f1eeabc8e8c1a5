// Memory of another GPU, mapped where kernels of this process's current GPU reach it, in the ways that a service can map it.
//
// What must stay true:
//  1. What the owner of the memory reads back is what the test compares: a mapping of the wrong memory cannot pass.
//  2. A process that owns GPU memory for the test is this very program started anew (own_gpu_memory, called by main), so
//     that no CUDA state is forked. It ends when the test lets go of it, or dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace needle::testing {

struct Peers {
  int here = 0;   // the current GPU
  int there = 0;  // another, whose memory it reaches
};
// The first pair, or why there is none.
struct FoundPeers {
  Peers peers;
  std::string none_because;  // empty where there is one
};
FoundPeers find_peers();

// `bytes` bytes on peers.there. write() and read() are the owner's own view of the memory.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  virtual std::byte* mapped() const = 0;  // for kernels on peers.here
  virtual void write(const std::vector<std::byte>& bytes) = 0;
  virtual std::vector<std::byte> read(int64_t bytes) = 0;
};

// This process's cudaMalloc, with peer access between the two GPUs.
std::unique_ptr<PeerMemory> memory_by_peer_access(const Peers& peers, int64_t bytes);
// Another process's cudaMalloc, by cudaIpcGetMemHandle.
std::unique_ptr<PeerMemory> memory_by_ipc_handle(const Peers& peers, int64_t bytes);
// Another process's cuMemCreate, exported as a file descriptor that comes over a Unix socket: how a pool's chunks travel.
std::unique_ptr<PeerMemory> memory_by_descriptor(const Peers& peers, int64_t bytes);

// The owning process: true where the arguments ask for it; main returns then.
bool own_gpu_memory(int argc, char** argv);

}  // namespace needle::testing
