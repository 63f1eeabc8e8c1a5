// The serving half: sends the pages that readers ask for. It knows no leases: what is asked for and registered is sent,
// and the reader has the core confirm generations after the last byte.
//
// Lives on the source's thread. Chunks are registered and released here too, since this thread alone knows which sends
// still read them. With one-sided get this half only answers pings.
//
// What must stay true:
//  1. Nothing is read from a chunk whose release was asked for, except by sends that UCX already had; the release is
//     answered when those ended.
//  2. A reader that is silent or gone costs its link: queue dropped, endpoint closed, sends ended. Nobody else waits for it.
//     A send that UCX does not end within silence_ns of the close is *held*: counted, logged, and its chunk not released; but
//     stop() does not wait for it, and a reader with kHeldLinksMax such links gets no other.
//  3. Links, queued pages and sends in flight are bounded; what is beyond is refused, not kept.
//  4. A new link of a reader's node ends its earlier ones. A connection that never says kHello ends by silence.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/units.h"
#include "server/transport/ucx/chunks.h"
#include "server/transport/ucx/counters.h"
#include "server/transport/ucx/reader.h"
#include "server/transport/ucx/wire.h"
#include "server/transport/ucx/worker_thread.h"

namespace needle::server::ucx {

class Source {
 public:
  using Released = std::function<void(PoolId, ChunkIndex)>;
  static constexpr size_t kLinksMax = 1'024;        // readers at once
  static constexpr size_t kQueuedPagesMax = 4'096;  // a link: several times what a reader keeps in flight

  Source(WorkerThread& thread, Chunks& chunks, Counters& counters, Log& log, HalfSettings settings, Released released);

  absl::Status listen(const SocketAddress& where);  // before the thread starts
  const SocketAddress& address() const { return listener_->address(); }

  // The rest on the thread.
  void release(PoolId pool, ChunkIndex chunk);
  int64_t turn(int64_t now_ns);  // see WorkerThread::Turn
  void stop();                   // says goodbye on every link; turn() ends when the readers closed them, or after kGoodbyeNs

 private:
  static constexpr int64_t kGoodbyeNs = 200 * kNanosPerMilli;  // a living reader closes within one; a dead one is not waited for
  struct Item {
    uint64_t ticket;
    uint32_t attempt;
    uint32_t part;
    uint32_t position;
    PoolId pool;
    PageIndex page;
    int64_t sent_bytes = 0;
  };

  struct Link {
    LinkName name;  // none before kHello
    NodeId reader;
    ucp_ep_h endpoint = nullptr;
    Call call = Call::kAmEager;
    std::deque<Item> queue;
    int64_t sends = 0;
    int64_t heard_ns = 0;
    const char* failure = nullptr;  // set: to be closed
    ucs_status_ptr_t closing = nullptr;
    bool is_closing = false;  // the endpoint's handle is another's from now on: UCX uses it anew
    int64_t closing_since_ns = 0;
    bool is_held = false;
  };

  struct Send {
    Source* source;
    uint64_t link;
    PoolId pool;
    ChunkIndex chunk;
    bool last;  // of its page
    PageHeader header;
  };

  static void on_request(ucp_conn_request_h request, void* self);
  static void on_endpoint_error(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t on_hello(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                               const ucp_am_recv_param_t* param);
  static ucs_status_t on_fetch(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                               const ucp_am_recv_param_t* param);
  static ucs_status_t on_cancel(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param);
  static ucs_status_t on_ping(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* send);

  Link* hear(const void* header, size_t header_bytes, size_t expected_bytes);
  void accept_waiting();
  void welcome(Link& link, const HelloHeader& hello);
  void fail(Link& link, const char* cause);
  bool close(Link& link, int64_t now_ns);  // true when the endpoint is gone and no send is left
  Link* link_over(ucp_ep_h endpoint);
  void pump(uint64_t number, Link& link);
  bool send_next(uint64_t number, Link& link);
  void refuse(Link& link, const Item& item, RefusalCause cause);
  void sent(Send* send, ucs_status_t status);
  void count_queued(int64_t pages) { counters_.pages_queued_now.fetch_add(pages); }

  WorkerThread& thread_;
  Chunks& chunks_;
  Counters& counters_;
  Log& log_;
  const HalfSettings settings_;
  const Released released_;
  std::vector<ucp_conn_request_h> requests_;  // to be accepted on the next turn, outside UCX's callback
  std::map<uint64_t, Link> links_;
  uint64_t links_made_ = 0;
  std::unique_ptr<Listener> listener_;
  int64_t turned_ns_ = 0;
  bool stopping_ = false;
  int64_t stopping_since_ns_ = 0;
};

}  // namespace needle::server::ucx
