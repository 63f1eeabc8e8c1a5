// Reads by the daemon's own kernels, for callers that map nothing: tools, remote readers, engines that ask.
//
// The same operations as in an engine's process, over the same pages: prepare_index_q where the query comes raw, index_logits
// in chunks of the scratch's size, select_topk, read_entries.
//
// What must stay true:
//  1. The caller holds a lease on the table's pages during the call and checks it afterwards; nothing here does.
//  2. Scores are made in chunks within the scratch that the budget counts; the longest sequence needs no more of it.
//  3. What a request says is checked against the pool's format and against the table before memory is touched.
//
// Called on the service's executor, one at a time.
#pragma once

#include <memory>
#include <vector>

#include "base/workers.h"
#include "kernels/page_format.h"
#include "server/memory/host_memory.h"
#include "server/node_plan.h"
#include "server/service.h"

namespace needle::server {

class KernelReads final : public RemoteReads {
 public:
  struct Pool {
    PageFormat format;  // of the paged pool
    const std::byte* base = nullptr;
    int64_t page_count = 0;
  };
  static std::vector<Pool> pools_of(const NodePlan& plan, const HostMemory& memory);

  KernelReads(std::vector<Pool> pools, int64_t threads, int64_t scratch_bytes);

  absl::Status read_topk(const PageTable& table, PoolSetId set, const v1::ReadTopkRequest& request, v1::ReadTopkReply& reply) override;
  absl::Status read_entries(const PageTable& table, PoolSetId set, const v1::ReadEntriesRequest& request,
                            v1::ReadEntriesReply& reply) override;

 private:
  const std::vector<Pool> pools_;
  WorkerThreads workers_;
  const int64_t scratch_bytes_;
};

}  // namespace needle::server
