// A UCX that does not give back what it was given, or gives it back late: what a defect in it did with 1.22, and what shared
// memory of a stopped process does with 1.13. This program's own ucp_am_recv_data_nbx, ucp_am_send_nbx and ucp_worker_progress
// stand before the library's: they keep chosen completions to themselves until they are told to let go.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "tests/server/ucx/ucx_node.h"

namespace needle::server::ucx::testing {
namespace {

// What is kept: a completion that UCX reported and the transport has not heard of.
class Keeper {
 public:
  struct Kept {
    ucp_worker_h worker;  // on whose thread it is told; none for a send, which is never told
    ucp_request_param_t param;
    void* request = nullptr;
    ucs_status_t status = UCS_OK;
    size_t bytes = 0;
    bool is_complete = false;
  };

  std::atomic<int64_t> receives_to_keep{0};
  std::atomic<int64_t> sends_to_keep{0};
  std::atomic<bool> lets_go{false};

  int64_t kept_count() {
    std::lock_guard<std::mutex> hold(mutex_);
    return static_cast<int64_t>(kept_.size());
  }
  Kept* keep(ucp_worker_h worker, const ucp_request_param_t& param) {
    std::lock_guard<std::mutex> hold(mutex_);
    kept_.push_back(std::make_unique<Kept>(Kept{worker, param, nullptr, UCS_OK, 0, false}));
    return kept_.back().get();
  }
  // Receives, on the worker's thread.
  void let_go(ucp_worker_h worker) {
    std::vector<std::unique_ptr<Kept>> going;
    {
      std::lock_guard<std::mutex> hold(mutex_);
      for (auto& kept : kept_) {
        if (kept->worker == worker && kept->is_complete) going.push_back(std::move(kept));
      }
      std::erase(kept_, nullptr);
    }
    for (const auto& kept : going) kept->param.cb.recv_am(kept->request, kept->status, kept->bytes, kept->param.user_data);
  }
  void reset() {
    receives_to_keep = 0;
    sends_to_keep = 0;
    lets_go = false;
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto& kept : kept_) forgotten_.push_back(std::move(kept));  // its completion may still come, at the worker's end
    kept_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Kept>> kept_;
  std::vector<std::unique_ptr<Kept>> forgotten_;
};

Keeper& keeper() {
  static Keeper* const made = new Keeper;
  return *made;
}

bool take_one(std::atomic<int64_t>& left) {
  int64_t seen = left.load();
  while (seen > 0) {
    if (left.compare_exchange_weak(seen, seen - 1)) return true;
  }
  return false;
}

template <class Function>
Function* library(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  NEEDLE_CHECK(found != nullptr, name);
  return reinterpret_cast<Function*>(found);
}

extern "C" {

ucs_status_ptr_t ucp_am_recv_data_nbx(ucp_worker_h worker, void* data, void* buffer, size_t bytes, const ucp_request_param_t* param) {
  static auto* const real = library<decltype(ucp_am_recv_data_nbx)>("ucp_am_recv_data_nbx");
  if (!take_one(keeper().receives_to_keep)) return real(worker, data, buffer, bytes, param);
  Keeper::Kept* kept = keeper().keep(worker, *param);
  ucp_request_param_t ours = *param;
  ours.user_data = kept;
  ours.cb.recv_am = [](void* request, ucs_status_t status, size_t length, void* argument) {
    auto* done = static_cast<Keeper::Kept*>(argument);
    done->request = request;
    done->status = status;
    done->bytes = length;
    done->is_complete = true;
  };
  const ucs_status_ptr_t request = real(worker, data, buffer, bytes, &ours);
  NEEDLE_CHECK(UCS_PTR_IS_PTR(request), "a rendezvous takes its time");
  return request;
}

ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h endpoint, unsigned id, const void* header, size_t header_bytes, const void* buffer, size_t bytes,
                                 const ucp_request_param_t* param) {
  static auto* const real = library<decltype(ucp_am_send_nbx)>("ucp_am_send_nbx");
  if (id != kPage || !take_one(keeper().sends_to_keep)) return real(endpoint, id, header, header_bytes, buffer, bytes, param);
  Keeper::Kept* kept = keeper().keep(nullptr, *param);
  ucp_request_param_t ours = *param;
  ours.user_data = kept;
  ours.cb.send = [](void* request, ucs_status_t status, void* argument) {
    auto* done = static_cast<Keeper::Kept*>(argument);
    done->request = request;
    done->status = status;
  };
  const ucs_status_ptr_t request = real(endpoint, id, header, header_bytes, buffer, bytes, &ours);
  NEEDLE_CHECK(UCS_PTR_IS_PTR(request), "a rendezvous takes its time");
  return request;
}

unsigned ucp_worker_progress(ucp_worker_h worker) {
  static auto* const real = library<decltype(ucp_worker_progress)>("ucp_worker_progress");
  if (keeper().lets_go) keeper().let_go(worker);
  return real(worker);
}

}  // extern "C"

class Held : public ::testing::Test {
 protected:
  ~Held() override { keeper().reset(); }
  static NodeSettings settings(uint32_t node) {
    NodeSettings made;
    made.node = node;
    made.call = "am-rendezvous";
    made.heartbeat_ms = 50;
    made.silence_ms = 400;
    return made;
  }
};

// A request of four pages of which UCX keeps one, and the end of the link that they came over.
void lose_a_page(UcxNode& reader, UcxNode& source) {
  source.fill(7);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  keeper().receives_to_keep = 1;
  reader.transport().post(reader.request(fetch_id(5), source.id(), source.incarnation(), 0, 4, 0));
  ASSERT_TRUE(reader.wait_for([] { return keeper().kept_count() == 1; }));
  reader.transport().close_peer(source.id());
}

TEST_F(Held, a_page_that_never_comes_back_costs_its_request_and_nobody_else) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  ASSERT_NO_FATAL_FAILURE(lose_a_page(reader, source));
  reader.transport().post(reader.request(fetch_id(6), source.id(), source.incarnation(), 8, 4, 8));
  EXPECT_TRUE(reader.wait_answer(fetch_id(6)).status.ok()) << "the peer's next link waited for a page of the last one";
  EXPECT_TRUE(reader.holds(8, 7, 8));
  EXPECT_EQ(reader.counters().links_held, 1);
  EXPECT_EQ(reader.counters().pages_held_now, 1);
  EXPECT_EQ(reader.counters().bytes_in_flight_now, 0);
  EXPECT_EQ(reader.fetched.count(fetch_id(5)), 0u) << "answered while UCX may still write into its page";
  reader.transport().stop();  // ends
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(5)).status, ErrorCode::kStopping));
}

TEST_F(Held, a_page_that_comes_back_late_ends_its_request) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  ASSERT_NO_FATAL_FAILURE(lose_a_page(reader, source));
  ASSERT_TRUE(reader.wait_for([&] { return reader.counters().pages_held_now == 1; }));
  keeper().lets_go = true;
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(5)).status, ErrorCode::kPeerLost));
  EXPECT_EQ(reader.counters().pages_held_now, 0);
  reader.transport().post(reader.request(fetch_id(6), source.id(), source.incarnation(), 0, 4, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(6)).status.ok());
}

TEST_F(Held, a_peer_that_costs_page_after_page_gets_no_link_any_more) {
  UcxNode source(settings(1));
  UcxNode other(settings(3));
  UcxNode reader(settings(2));
  source.fill(7);
  other.fill(9);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  reader.meet(other, other.register_chunks());
  for (uint64_t link = 0; link < kHeldLinksMax; ++link) {
    keeper().receives_to_keep = 1;
    reader.transport().post(reader.request(fetch_id(10 + link), source.id(), source.incarnation(), 0, 1, static_cast<int64_t>(link)));
    ASSERT_TRUE(reader.wait_for([&] { return keeper().kept_count() == static_cast<int64_t>(link) + 1; }));
    reader.transport().close_peer(source.id());
    ASSERT_TRUE(reader.wait_for([&] { return reader.counters().links_held == static_cast<int64_t>(link) + 1; }));
  }
  reader.transport().post(reader.request(fetch_id(5), source.id(), source.incarnation(), 0, 1, 20));
  const FetchCompletion& refused = reader.wait_answer(fetch_id(5));
  EXPECT_TRUE(is_error(refused.status, ErrorCode::kPeerLost));
  EXPECT_NE(refused.status.message().find("restart this daemon"), absl::string_view::npos) << refused.status;
  reader.transport().post(reader.request(fetch_id(6), other.id(), other.incarnation(), 0, 1, 20));
  EXPECT_TRUE(reader.wait_answer(fetch_id(6)).status.ok());
  EXPECT_TRUE(reader.holds(20, 9, 0));
}

TEST_F(Held, a_send_that_never_ends_keeps_its_chunk_and_neither_the_reader_nor_the_stop_waits) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  source.fill(7);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  keeper().sends_to_keep = 1;
  reader.transport().post(reader.request(fetch_id(5), source.id(), source.incarnation(), 0, 4, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(5)).status.ok());
  reader.transport().close_peer(source.id());
  ASSERT_TRUE(source.wait_for([&] { return source.counters().sends_held_now == 1; }));
  EXPECT_EQ(source.counters().source_links_held, 1);
  EXPECT_EQ(source.counters().source_links_now, 0);
  reader.transport().post(reader.request(fetch_id(6), source.id(), source.incarnation(), 8, 4, 8));
  EXPECT_TRUE(reader.wait_answer(fetch_id(6)).status.ok());
  source.transport().release_chunk(PoolId(0), ChunkIndex(0));
  reader.transport().post(reader.request(fetch_id(7), source.id(), source.incarnation(), 8, 4, 8));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(7)).status, ErrorCode::kStale)) << "asked for after the release";
  EXPECT_TRUE(source.released.empty());
  source.transport().stop();  // ends
  EXPECT_EQ(source.counters().sends_held_now, 1);
}

}  // namespace
}  // namespace needle::server::ucx::testing
