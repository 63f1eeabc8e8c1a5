// The reading half: asks sources for pages, lands them, hashes them, and says when nothing can land any more.
//
// Lives on the reader's thread; UcxTransport posts its calls to it. A peer is met once (address), then learned (chunks).
// connect() or the first request to a peer opens a *link*; the link ends whole, by an error, by silence or by close_peer, and takes
// every request to that peer with it. The next request opens another under the next number.
//
// A page of a request:  waiting -> asked -> landing -> arrived
//                       waiting or asked -> gone, at once, when its request was cancelled or failed
//                       landing -> gone, when UCX says that it ended, which a forced close hastens
//
// What must stay true:
//  1. A request is answered exactly once, when none of its pages is landing; only pages that are asked for are landed.
//  2. Landing pages end by their own completion, which a forced close of the link hastens. No timer ends them. A page that
//     UCX does not give back within silence_ns of the close (it takes a few rounds; a defect, or a stopped process in shared
//     memory, makes it never) is *held*: counted, logged, its request unanswered; but neither the peer's next link nor
//     stop() waits for it. A peer with kHeldLinksMax such links gets no other.
//  3. Bytes asked for and not arrived stay below bytes_in_flight_max a link, or are one page.
//  4. Silence is measured while this thread runs: after a pause of our own (SIGSTOP, a debugger) the peer gets its time anew.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/log.h"
#include "server/transport/transport.h"
#include "server/transport/ucx/call_probe.h"
#include "server/transport/ucx/chunks.h"
#include "server/transport/ucx/counters.h"
#include "server/transport/ucx/wire.h"
#include "server/transport/ucx/worker_thread.h"

namespace needle::server::ucx {

// Of a landed page; called on the reader's thread while the page is warm.
using PageChecksum = std::function<uint64_t(PoolId pool, std::span<const std::byte> page)>;

// What both halves are told.
struct HalfSettings {
  NodeId node;
  uint64_t instance = 0;
  int64_t heartbeat_ns = 0;
  int64_t silence_ns = 0;
  int64_t bytes_in_flight_max = 0;
  int64_t sends_in_flight_max = 0;
  int64_t message_bytes_max = 0;                                       // of an eager page's part; 0: the page whole
  std::function<Call(const std::vector<std::string>& lanes)> call_of;  // for an endpoint with these lanes
};

inline constexpr int64_t kHeldLinksMax = 8;  // a peer: bounds the pages that it can take out of use

class Reader {
 public:
  using Answer = std::function<void(FetchCompletion)>;

  Reader(WorkerThread& thread, const Chunks& chunks, Counters& counters, Log& log, HalfSettings settings, PageChecksum checksum,
         Answer answer);
  ~Reader();

  absl::Status listen();  // before the thread starts

  // The rest on the thread.
  void meet(NodeId peer, Incarnation incarnation, uint64_t instance, const SocketAddress& address);
  void connect(NodeId peer);  // opens the link now, so that the first request need not wait for it
  void learn(NodeId peer, Incarnation incarnation, const std::vector<ChunkDescriptor>& chunks);
  void fetch(FetchRequest request);
  void cancel(FetchId id);
  void close_peer(NodeId peer, const absl::Status& cause);
  int64_t turn(int64_t now_ns);  // see WorkerThread::Turn
  void stop();                   // every request is answered; turn() ends when every link is closed
  void abandon();                // after the thread's end: answers the requests whose pages UCX still holds

 private:
  enum class Stage : uint8_t { kWaiting, kAsked, kLanding, kArrived, kGone };

  struct Page {
    WantedPage wanted;
    PoolId target_pool;
    PagePlace target;
    int64_t landed_bytes = 0;
    Stage stage = Stage::kWaiting;
  };

  struct Fetch {
    FetchId id;
    NodeId peer;
    std::vector<Page> pages;
    std::vector<uint64_t> checksums;
    int64_t landing = 0;  // pages in kLanding
    int64_t arrived = 0;
    absl::Status status;  // of a request that ended early
    size_t next = 0;      // first page that may still be waiting
  };

  struct RemoteChunk {
    ChunkGeometry geometry;
    std::string key;
  };

  struct Link {
    LinkName name;
    ucp_ep_h endpoint = nullptr;
    bool is_welcome = false;  // connected, and by the one that was meant
    Call call = Call::kAmEager;
    std::map<std::pair<PoolId, ChunkIndex>, ucp_rkey_h> keys;
    int64_t heard_ns = 0;
    int64_t pinged_ns = 0;
    int64_t bytes_in_flight = 0;
    int64_t landing = 0;   // pages that UCX works on
    absl::Status failure;  // set: the link is to be closed
    ucs_status_ptr_t closing = nullptr;
    bool is_closing = false;
    int64_t closing_since_ns = 0;
  };

  // What UCX did not give back of a link that is gone.
  struct Held {
    NodeId peer;
    int64_t pages = 0;
  };

  struct Peer {
    NodeId node;
    Incarnation incarnation;
    uint64_t instance = 0;
    SocketAddress address;
    std::map<std::pair<PoolId, ChunkIndex>, RemoteChunk> chunks;
    std::unique_ptr<Link> link;
    std::deque<FetchId> waiting;  // requests with pages to ask for, oldest first
  };

  // A get or a receive that UCX works on.
  struct Landing {
    Reader* reader;
    FetchId id;
    uint32_t position;
    uint64_t link;  // its number
  };

  static void on_endpoint_error(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t on_page(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param);
  static ucs_status_t on_welcome(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* param);
  static ucs_status_t on_refused(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* param);
  static ucs_status_t on_pong(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param);
  static ucs_status_t on_goodbye(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* param);
  static void on_got(void* request, ucs_status_t status, void* landing);
  static void on_received(void* request, ucs_status_t status, size_t bytes, void* landing);

  Peer* peer_of_link(const LinkName& name);
  Peer* hear(const void* header, size_t header_bytes, size_t expected_bytes, LinkName& name);
  void open_link(Peer& peer, int64_t now_ns);
  enum class Ending { kFault, kAnnounced };  // announced: by the peer's goodbye, or because this transport stops
  void fail_link(Peer& peer, absl::Status cause, Ending ending = Ending::kFault);
  void close_link(Peer& peer, int64_t now_ns);
  bool finish_close(Peer& peer, int64_t now_ns);
  void give_back(uint64_t link);
  void tend(Peer& peer, int64_t now_ns);
  void pump(Peer& peer);
  bool ask(Peer& peer, Fetch& fetch);
  void get(Peer& peer, Fetch& fetch, Page& page);
  ucp_rkey_h key_of(Peer& peer, PoolId pool, ChunkIndex chunk);
  ucs_status_t take_page(Peer& peer, const PageHeader& header, void* data, size_t bytes, const ucp_am_recv_param_t* param);
  void landed(Landing* landing, ucs_status_t status);
  void arrived(Fetch& fetch, Page& page);
  void end(Fetch& fetch, absl::Status status);
  void answer_if_over(Fetch& fetch);
  void refuse(const FetchRequest& request, absl::Status status);
  void add_in_flight(Peer& peer, int64_t bytes);
  Landing* start_landing(Peer& peer, Fetch& fetch, Page& page);

  WorkerThread& thread_;
  const Chunks& chunks_;
  Counters& counters_;
  Log& log_;
  const HalfSettings settings_;
  const PageChecksum checksum_;
  const Answer answer_;
  std::map<NodeId, Peer> peers_;
  std::map<FetchId, Fetch> fetches_;
  std::map<uint64_t, Held> held_;  // by the link's number
  uint64_t links_made_ = 0;
  int64_t turned_ns_ = 0;
  bool stopping_ = false;
};

// Sends a small message whose bytes it keeps until UCX is done with them. False: the endpoint refused. The receiver of a
// message `with_reply` is told the endpoint over which it came.
bool send_control(ucp_ep_h endpoint, MessageId id, std::string header, std::string payload, bool with_reply = false);

template <class Header>
std::string bytes_of(const Header& header) {
  return std::string(reinterpret_cast<const char*>(&header), sizeof header);
}

}  // namespace needle::server::ucx
