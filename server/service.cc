#include "server/service.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/attach.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"
#include "server/executor.h"
#include "server/grpc_door.h"
#include "server/wire_convert.h"

namespace needle::server {

namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// 65,536 page names with checksums take 1.6 MB; queries of a remote read 16 KiB each.
constexpr int kRequestBytesMax = 16 << 20;
constexpr int kHandshakeMs = 10'000;  // a caller that has not begun to speak HTTP/2 by then is closed

grpc::Status grpc_status(CallbackServerContext* context, const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::optional<ErrorCode> code = error_code(status);
  if (code.has_value()) context->AddTrailingMetadata(attach::kErrorMetadata, error_row(*code).name);
  if (const int64_t hint = retry_after_ms(status); hint > 0) context->AddTrailingMetadata(attach::kRetryAfterMetadata, absl::StrCat(hint));
  // gRPC cuts headers at 8 KiB in all; both format texts of a refusal fit when they are the models' own.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message().substr(0, 6 * 1024)));
}

std::string metadata_of(const CallbackServerContext* context, const char* key) {
  const auto found = context->client_metadata().find(key);
  return found == context->client_metadata().end() ? std::string() : std::string(found->second.data(), found->second.size());
}

}  // namespace

class Service::Impl {
 public:
  Impl(ServiceOptions options, ServiceDoors doors)
      : options_(std::move(options)), doors_(std::move(doors)), needle_(*this), operator_(*this), peer_(*this) {}

  absl::Status start() {
    grpc::EnableDefaultHealthCheckService(true);
    static std::once_flag reflection;  // process-wide: a second service (tests) must not register it twice
    std::call_once(reflection, [] { grpc::reflection::InitProtoReflectionServerBuilderPlugin(); });
    grpc::ServerBuilder builder;
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
    builder.SetMaxReceiveMessageSize(kRequestBytesMax);
    builder.SetMaxSendMessageSize(-1);
    builder.RegisterService(&needle_);
    builder.RegisterService(&operator_);
    builder.RegisterService(&peer_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return make_error(ErrorCode::kMemory, "gRPC cannot start a server; its own lines above say why");
    absl::StatusOr<std::unique_ptr<GrpcDoor>> door = GrpcDoor::open(options_.unix_path, options_.tcp_address, *acceptor_, doors_.log);
    if (!door.ok()) return door.status();
    door_ = *std::move(door);
    return absl::OkStatus();
  }

  void stop(int64_t deadline_ms) {
    if (server_ == nullptr) return;
    door_.reset();
    // A wait for a ship may last minutes: what is still open at the deadline is answered here, or Shutdown would wait for it.
    std::thread cutter([this, deadline_ms] {
      const Condition::Time until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
      {
        MutexLock hold(mutex_);
        while (!open_.empty() && landed_.wait_until(mutex_, until)) {
        }
        if (open_.empty()) return;
      }
      executor_.run([this] { cut_off(); });
    });
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms + 1000));
    cutter.join();
    server_->Wait();
    server_.reset();
    read_executor_.stop();
    executor_.stop();
  }
  ~Impl() { stop(0); }

  void set_serving(const std::string& facet, bool serving) {
    if (server_ != nullptr) server_->GetHealthCheckService()->SetServingStatus(facet, serving);
  }

 private:
  // One call under way: where its answer goes and what is counted of it. `context`, `reactor` and the reply's message are
  // alive exactly while its id is in open_; the executors look there before they write a reply, and calls are cut off on
  // the first of them while the second holds still.
  struct Flight {
    uint64_t id;
    CallbackServerContext* context;
    ServerUnaryReactor* reactor;
    Verb verb;
    int64_t started_ns;
    int64_t pages = 0;
  };

  Flight depart(CallbackServerContext* context, Verb verb) {
    MutexLock hold(mutex_);
    const Flight flight{next_flight_++, context, context->DefaultReactor(), verb, doors_.clock.now_ns(), 0};
    open_.emplace(flight.id, flight);
    return flight;
  }

  bool is_open(const Flight& flight) {
    MutexLock hold(mutex_);
    return open_.count(flight.id) > 0;
  }

  void land(const Flight& flight, const absl::Status& status) {
    {
      MutexLock hold(mutex_);
      if (open_.erase(flight.id) == 0) return;  // cut off before
      if (open_.empty()) landed_.notify_all();
    }
    doors_.metrics.record(flight.verb, status, doors_.clock.now_ns() - flight.started_ns, flight.pages);
    flight.reactor->Finish(grpc_status(flight.context, status));
  }

  void cut_off() {
    MutexLock reading(read_mutex_);  // no read is writing into a reply meanwhile
    std::map<uint64_t, Flight> left;
    {
      MutexLock hold(mutex_);
      left = open_;
    }
    for (const auto& [id, flight] : left)
      land(flight, make_error(ErrorCode::kStopping, "this daemon stops; what it was asked for did not end in time"));
  }

  ServerUnaryReactor* refuse(const Flight& flight, const absl::Status& status) {
    land(flight, status);
    return flight.reactor;
  }

  // Posts a request; `fill` writes the reply's message on the executor and returns the pages it names.
  template <class Request, class Fill>
  ServerUnaryReactor* post(Flight flight, Request request, Fill fill) {
    (void)doors_.post(
        Call<Request>{std::move(request), [this, flight, fill = std::move(fill)](absl::StatusOr<typename Request::Reply> reply) mutable {
                        executor_.run([this, flight, fill = std::move(fill), reply = std::move(reply)]() mutable {
                          if (!is_open(flight)) return;
                          if (reply.ok()) flight.pages += fill(*reply);
                          land(flight, reply.status());
                        });
                      }});
    return flight.reactor;
  }

  absl::StatusOr<SessionId> session_of(const CallbackServerContext* context) const {
    uint64_t session = 0;
    const std::string id = metadata_of(context, attach::kSessionMetadata);
    const std::string secret = metadata_of(context, attach::kSecretMetadata);
    if (id.empty() || id.size() > 20 || !absl::SimpleAtoi(id, &session)) {
      return make_error(ErrorCode::kWrongOwner, absl::StrCat("the call carries no session; attach first, then send ",
                                                             attach::kSessionMetadata, " and ", attach::kSecretMetadata, " as metadata"));
    }
    if (absl::Status status = doors_.registry.check(SessionId(session), {secret.data(), secret.size()}); !status.ok()) return status;
    return SessionId(session);
  }

  // The common shape of a session's verb: who asks, then the request, then the reply.
  template <class Make, class Fill>
  ServerUnaryReactor* session_call(CallbackServerContext* context, Verb verb, Make make, Fill fill) {
    const Flight flight = depart(context, verb);
    absl::StatusOr<SessionId> session = session_of(context);
    if (!session.ok()) return refuse(flight, session.status());
    return post(flight, make(*session), std::move(fill));
  }

  bool may_operate(const CallbackServerContext* context) const {
    return options_.remote_operators || context->peer().rfind("unix:", 0) == 0;
  }
  absl::Status operator_check(const CallbackServerContext* context) const {
    if (may_operate(context)) return absl::OkStatus();
    return make_error(ErrorCode::kWrongOwner, absl::StrCat("operator calls are taken at unix:", options_.unix_path,
                                                           " only; listen.remote_operators opens the TCP port"));
  }

  absl::StatusOr<const ServicePoolSet*> set_named(const std::string& name) const {
    if (name.empty() && options_.sets.size() == 1) return &options_.sets[0];
    std::string known;
    for (const ServicePoolSet& set : options_.sets) {
      if (set.name == name) return &set;
      absl::StrAppend(&known, known.empty() ? "" : ", ", set.name);
    }
    return make_error(ErrorCode::kNotFound, absl::StrCat("no pool '", name.substr(0, 64), "' here; there are: ", known));
  }

  void session_over(SessionId session) {
    doors_.registry.remove(session);
    doors_.session_ended(session);
  }

  // A read by the daemon's kernels: lease, read, check that the bytes were good all along, release.
  template <class Request, class Reply, class Read>
  ServerUnaryReactor* remote_read(CallbackServerContext* context, Verb verb, const Request* request, Reply* reply, Read read) {
    const Flight flight = depart(context, verb);
    absl::StatusOr<SessionId> session = session_of(context);
    if (!session.ok()) return refuse(flight, session.status());
    if (doors_.reads == nullptr)
      return refuse(flight,
                    make_error(ErrorCode::kImpossible, "this daemon reads for nobody: it was built without kernels for its pools' memory"));
    absl::StatusOr<const ServicePoolSet*> set = set_named(doors_.registry.entry(*session).pool_set);
    if (!set.ok()) return refuse(flight, set.status());
    const auto finish = [this, flight, session = *session, set_id = (*set)->set, request, reply, read](PageTable table, LeaseId lease,
                                                                                                       bool release) {
      absl::Status read_status;
      {
        MutexLock reading(read_mutex_);
        if (!is_open(flight)) return;
        read_status = read(*doors_.reads, table, set_id, *request, *reply);
      }
      (void)doors_.post(
          Call<Recheck>{{session, lease, {}}, [this, flight, session, lease, release, read_status, reply](absl::StatusOr<Nothing> good) {
                          executor_.run([this, flight, session, lease, release, read_status, reply, good = good.status()] {
                            if (release) (void)doors_.post(Call<Release>{{session, lease}, [](absl::StatusOr<Nothing>) {}});
                            if (!is_open(flight)) return;
                            if (read_status.ok() && !good.ok()) reply->Clear();  // the bytes were not good all along
                            land(flight, read_status.ok() ? good : read_status);
                          });
                        }});
    };
    // A lease that is already open answers a repeated acquire with its table; a fresh id on a sequence is for this call alone.
    const bool own = request->sequence() != 0;
    const LeaseId lease(own ? next_read_lease_.fetch_add(1, std::memory_order_relaxed) : request->lease());
    (void)doors_.post(Call<Acquire>{{*session, lease, SequenceId(request->sequence()), {}},
                                    [this, flight, lease, own, finish](absl::StatusOr<Acquire::Reply> acquired) {
                                      read_executor_.run([this, flight, lease, own, finish, acquired = std::move(acquired)] {
                                        if (!acquired.ok()) return land(flight, acquired.status());
                                        finish(acquired->table, lease, own);
                                      });
                                    }});
    return flight.reactor;
  }

  // ------------------------------------------------------------------------------------------------------------- clients
  class NeedleService final : public v1::Needle::CallbackService {
   public:
    explicit NeedleService(Impl& impl) : impl_(impl) {}

    ServerUnaryReactor* OpenSession(CallbackServerContext* context, const v1::OpenSessionRequest* request,
                                    v1::OpenSessionReply* reply) override {
      Impl& impl = impl_;
      const Flight flight = impl.depart(context, Verb::open_session);
      absl::StatusOr<const ServicePoolSet*> set = impl.set_named(request->pool_set());
      if (!set.ok()) return impl.refuse(flight, set.status());
      if (!request->format().empty()) {
        const absl::Status same = check_same_format_set((*set)->format, request->format());
        if (!same.ok()) return impl.refuse(flight, make_error(ErrorCode::kFormatMismatch, std::string(same.message())));
      }
      absl::StatusOr<SessionSecret> secret = make_secret();
      if (!secret.ok()) return impl.refuse(flight, secret.status());
      Attach attach;
      attach.pool_set = (*set)->name;
      attach.format = (*set)->format;
      return impl.post(flight, std::move(attach),
                       [&impl, set = *set, secret = *secret, client = request->client().substr(0, attach::kNameBytesMax),
                        reply](const Attach::Reply& attached) {
                         impl.doors_.registry.add({attached.session, client, set->name, {}, false}, secret, nullptr);
                         reply->set_session(attached.session.value());
                         reply->set_secret(secret.data(), secret.size());
                         reply->set_incarnation(attached.incarnation.value());
                         reply->set_heartbeat_ms(static_cast<uint32_t>(attached.heartbeat_ms));
                         reply->set_format(set->format);
                         for (int kind = 0; kind < kPoolKinds; ++kind) {
                           const PoolLayout& layout = attached.pools[static_cast<size_t>(kind)];
                           v1::PoolLayout* wire = reply->add_pools();
                           wire->set_pool(layout.pool.value());
                           wire->set_kind(kPoolKindNames[kind]);
                           wire->set_epoch(layout.epoch.value());
                           wire->set_page_bytes(layout.shape.page_bytes);
                           wire->set_page_tokens(layout.shape.page_tokens);
                           wire->set_chunk_bytes(layout.shape.chunk_bytes);
                           wire->set_chunks_max(layout.shape.chunks_max);
                         }
                         return int64_t{0};
                       });
    }

    ServerUnaryReactor* Heartbeat(CallbackServerContext* context, const v1::Empty*, v1::Empty*) override {
      return impl_.session_call(
          context, Verb::heartbeat, [](SessionId session) { return server::Heartbeat{session}; }, nothing);
    }
    ServerUnaryReactor* CloseSession(CallbackServerContext* context, const v1::Empty*, v1::Empty*) override {
      return ending_call<Detach>(context, Verb::close_session);
    }
    ServerUnaryReactor* Acknowledge(CallbackServerContext* context, const v1::Empty*, v1::Empty*) override {
      return ending_call<server::Acknowledge>(context, Verb::acknowledge);
    }

    ServerUnaryReactor* Reserve(CallbackServerContext* context, const v1::ReserveRequest* request, v1::ReserveReply* reply) override {
      absl::StatusOr<std::vector<PageName>> names = wire::names_of(request->names());
      if (!names.ok()) return impl_.refuse(impl_.depart(context, Verb::reserve), names.status());
      return impl_.session_call(
          context, Verb::reserve,
          [&](SessionId session) {
            return server::Reserve{session,
                                   TicketId(request->ticket()),
                                   SequenceId(request->sequence()),
                                   request->tokens(),
                                   *std::move(names),
                                   {request->resume_tokens_wanted().begin(), request->resume_tokens_wanted().end()}};
          },
          [reply](const server::Reserve::Reply& reserved) {
            wire::put(reserved, reply);
            return static_cast<int64_t>(reserved.view.paged.size());
          });
    }
    ServerUnaryReactor* Extend(CallbackServerContext* context, const v1::ExtendRequest* request, v1::TicketView* reply) override {
      return step_call<server::Extend>(context, Verb::extend, request, reply);
    }
    ServerUnaryReactor* Publish(CallbackServerContext* context, const v1::ExtendRequest* request, v1::TicketView* reply) override {
      return step_call<server::Publish>(context, Verb::publish, request, reply);
    }
    ServerUnaryReactor* Truncate(CallbackServerContext* context, const v1::ExtendRequest* request, v1::TicketView* reply) override {
      return step_call<server::Truncate>(context, Verb::truncate, request, reply);
    }
    ServerUnaryReactor* SealPages(CallbackServerContext* context, const v1::SealPagesRequest* request, v1::TicketView* reply) override {
      absl::StatusOr<std::vector<FullPageSeal>> seals = wire::seals_of(request->pages());
      if (!seals.ok()) return impl_.refuse(impl_.depart(context, Verb::seal_pages), seals.status());
      const int64_t pages = static_cast<int64_t>(seals->size());
      return impl_.session_call(
          context, Verb::seal_pages,
          [&](SessionId session) {
            return server::SealPages{session, TicketId(request->ticket()), request->step(), *std::move(seals)};
          },
          [reply, pages](const TicketView& view) {
            wire::put(view, reply);
            return pages;
          });
    }
    ServerUnaryReactor* SealResumePoint(CallbackServerContext* context, const v1::SealResumePointRequest* request, v1::Empty*) override {
      return impl_.session_call(
          context, Verb::seal_resume_point,
          [&](SessionId session) {
            return server::SealResumePoint{session,
                                           TicketId(request->ticket()),
                                           request->tokens(),
                                           {request->window_checksums().begin(), request->window_checksums().end()},
                                           request->state_checksum()};
          },
          nothing);
    }
    ServerUnaryReactor* Seal(CallbackServerContext* context, const v1::SealRequest* request, v1::SealReply* reply) override {
      absl::StatusOr<std::vector<FullPageSeal>> seals = wire::seals_of(request->pages());
      if (!seals.ok()) return impl_.refuse(impl_.depart(context, Verb::seal), seals.status());
      const int64_t pages = static_cast<int64_t>(seals->size());
      return impl_.session_call(
          context, Verb::seal,
          [&](SessionId session) {
            server::Seal seal;
            seal.session = session;
            seal.ticket = TicketId(request->ticket());
            seal.step = request->step();
            seal.tokens = request->tokens();
            seal.pages = *std::move(seals);
            seal.partial_checksum = request->partial_checksum();
            seal.window_checksums.assign(request->window_checksums().begin(), request->window_checksums().end());
            seal.state_checksum = request->state_checksum();
            seal.lease = LeaseId(request->lease());
            return seal;
          },
          [reply, pages](const server::Seal::Reply& sealed) {
            reply->set_sequence(sealed.sequence.value());
            reply->set_lease(sealed.lease.value());
            wire::put(sealed.table, reply->mutable_table());
            return pages;
          });
    }
    ServerUnaryReactor* Forfeit(CallbackServerContext* context, const v1::ForfeitRequest* request, v1::Empty*) override {
      return impl_.session_call(
          context, Verb::forfeit,
          [&](SessionId session) {
            return server::Forfeit{session, TicketId(request->ticket()), request->fenced()};
          },
          nothing);
    }
    ServerUnaryReactor* Adopt(CallbackServerContext* context, const v1::AdoptRequest* request, v1::AdoptReply* reply) override {
      return impl_.session_call(
          context, Verb::adopt,
          [&](SessionId session) {
            return server::Adopt{session, LeaseId(request->lease()), TicketId(request->ticket()), SequenceId(request->sequence()),
                                 request->tokens()};
          },
          [reply](const server::Adopt::Reply& adopted) {
            wire::put(adopted, reply);
            return static_cast<int64_t>(adopted.view.paged.size());
          });
    }

    ServerUnaryReactor* Lookup(CallbackServerContext* context, const v1::LookupRequest* request, v1::LookupReply* reply) override {
      absl::StatusOr<std::vector<PageName>> names = wire::names_of(request->names());
      if (!names.ok()) return impl_.refuse(impl_.depart(context, Verb::lookup), names.status());
      const int64_t pages = static_cast<int64_t>(names->size());
      return impl_.session_call(
          context, Verb::lookup,
          [&](SessionId session) {
            return server::Lookup{session, *std::move(names)};
          },
          [reply, pages](const server::Lookup::Reply& found) {
            reply->set_matched_tokens(found.matched_tokens);
            reply->set_resume_tokens(found.resume_tokens);
            return pages;
          });
    }
    ServerUnaryReactor* Acquire(CallbackServerContext* context, const v1::AcquireRequest* request, v1::AcquireReply* reply) override {
      absl::StatusOr<std::vector<PageName>> names = wire::names_of(request->names());
      if (!names.ok()) return impl_.refuse(impl_.depart(context, Verb::acquire), names.status());
      return impl_.session_call(
          context, Verb::acquire,
          [&](SessionId session) {
            return server::Acquire{session, LeaseId(request->lease()), SequenceId(request->sequence()), *std::move(names)};
          },
          [reply](const server::Acquire::Reply& acquired) {
            reply->set_lease(acquired.lease.value());
            wire::put(acquired.table, reply->mutable_table());
            reply->set_renew_ms(acquired.renew_ms);
            return static_cast<int64_t>(acquired.table.paged.size());
          });
    }
    ServerUnaryReactor* Release(CallbackServerContext* context, const v1::LeaseRequest* request, v1::Empty*) override {
      return impl_.session_call(
          context, Verb::release,
          [&](SessionId session) {
            return server::Release{session, LeaseId(request->lease())};
          },
          nothing);
    }
    ServerUnaryReactor* Recheck(CallbackServerContext* context, const v1::RecheckRequest* request, v1::Empty*) override {
      if (request->pools_size() != request->pages_size()) {
        return impl_.refuse(impl_.depart(context, Verb::recheck),
                            make_error(ErrorCode::kInvalid, "recheck: `pools` and `pages` differ in length"));
      }
      return impl_.session_call(
          context, Verb::recheck,
          [&](SessionId session) {
            server::Recheck recheck{session, LeaseId(request->lease()), {}};
            for (int i = 0; i < request->pages_size(); ++i)
              recheck.pages.push_back({PoolId(request->pools(i)), wire::unpack(request->pages(i))});
            return recheck;
          },
          nothing);
    }
    ServerUnaryReactor* ReadTopk(CallbackServerContext* context, const v1::ReadTopkRequest* request, v1::ReadTopkReply* reply) override {
      return impl_.remote_read(context, Verb::read_topk, request, reply,
                               [](RemoteReads& reads, const PageTable& table, PoolSetId set, const v1::ReadTopkRequest& in,
                                  v1::ReadTopkReply& out) { return reads.read_topk(table, set, in, out); });
    }
    ServerUnaryReactor* ReadEntries(CallbackServerContext* context, const v1::ReadEntriesRequest* request,
                                    v1::ReadEntriesReply* reply) override {
      return impl_.remote_read(context, Verb::read_entries, request, reply,
                               [](RemoteReads& reads, const PageTable& table, PoolSetId set, const v1::ReadEntriesRequest& in,
                                  v1::ReadEntriesReply& out) { return reads.read_entries(table, set, in, out); });
    }

    ServerUnaryReactor* ShipStart(CallbackServerContext* context, const v1::ShipStartRequest* request, v1::Empty*) override {
      const Flight flight = impl_.depart(context, Verb::ship_start);
      absl::StatusOr<SessionId> session = impl_.session_of(context);
      if (!session.ok()) return impl_.refuse(flight, session.status());
      absl::StatusOr<NodeId> source = impl_.doors_.peers.find(request->peer());
      if (!source.ok()) return impl_.refuse(flight, source.status());
      if (absl::Status there = impl_.doors_.peers.check_reachable(*source); !there.ok()) return impl_.refuse(flight, there);
      const absl::Status format = impl_.doors_.peers.check_format(*source, impl_.doors_.registry.entry(*session).pool_set);
      if (!format.ok()) return impl_.refuse(flight, format);
      return impl_.post(flight,
                        server::ShipStart{*session, TicketId(request->ticket()), SequenceId(request->sequence()), *source,
                                          LeaseId(request->lease()), request->deadline_ms()},
                        nothing);
    }
    ServerUnaryReactor* ShipProgress(CallbackServerContext* context, const v1::TicketRequest* request,
                                     v1::ShipProgressReply* reply) override {
      return impl_.session_call(
          context, Verb::ship_progress,
          [&](SessionId session) {
            return server::ShipProgress{session, TicketId(request->ticket())};
          },
          [reply](const server::ShipProgress::Reply& progress) {
            reply->set_state(kShipStateNames[static_cast<size_t>(progress.state)]);
            reply->set_attempt(progress.attempt);
            reply->set_pages_known(progress.pages_known);
            reply->set_pages_arrived(progress.pages_arrived);
            reply->set_bytes_arrived(progress.bytes_arrived);
            reply->set_source_complete(progress.source_complete);
            return int64_t{0};
          });
    }
    ServerUnaryReactor* ShipWait(CallbackServerContext* context, const v1::TicketRequest* request, v1::LeasedTable* reply) override {
      return impl_.session_call(
          context, Verb::ship_wait,
          [&](SessionId session) {
            return server::ShipWait{session, TicketId(request->ticket())};
          },
          [reply](const server::ShipWait::Reply& shipped) {
            reply->set_lease(shipped.lease.value());
            wire::put(shipped.table, reply->mutable_table());
            return static_cast<int64_t>(shipped.table.paged.size());
          });
    }
    ServerUnaryReactor* ShipCancel(CallbackServerContext* context, const v1::TicketRequest* request, v1::Empty*) override {
      return impl_.session_call(
          context, Verb::ship_cancel,
          [&](SessionId session) {
            return server::ShipCancel{session, TicketId(request->ticket())};
          },
          nothing);
    }
    ServerUnaryReactor* Forget(CallbackServerContext* context, const v1::TicketRequest* request, v1::Empty*) override {
      return impl_.session_call(
          context, Verb::forget,
          [&](SessionId session) {
            return server::Forget{session, TicketId(request->ticket())};
          },
          nothing);
    }

   private:
    static int64_t nothing(const Nothing&) { return 0; }

    template <class Request>
    ServerUnaryReactor* step_call(CallbackServerContext* context, Verb verb, const v1::ExtendRequest* request, v1::TicketView* reply) {
      return impl_.session_call(
          context, verb,
          [&](SessionId session) {
            return Request{session, TicketId(request->ticket()), request->step(), request->tokens()};
          },
          [reply](const TicketView& view) {
            wire::put(view, reply);
            return static_cast<int64_t>(view.paged.size());
          });
    }
    template <class Request>
    ServerUnaryReactor* ending_call(CallbackServerContext* context, Verb verb) {
      const absl::StatusOr<SessionId> asker = impl_.session_of(context);
      return impl_.session_call(
          context, verb, [](SessionId session) { return Request{session}; },
          [&impl = impl_, asker](const Nothing&) {
            if (asker.ok()) impl.session_over(*asker);
            return int64_t{0};
          });
    }

    Impl& impl_;
  };

  // ----------------------------------------------------------------------------------------------------------- operators
  class OperatorService final : public v1::Operator::CallbackService {
   public:
    explicit OperatorService(Impl& impl) : impl_(impl) {}

    ServerUnaryReactor* Status(CallbackServerContext* context, const v1::Empty*, v1::StatusReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::status);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      return impl_.post(flight, server::Status{}, [&impl = impl_, reply](const Snapshot& snapshot) {
        impl.fill_status(snapshot, *reply);
        return int64_t{0};
      });
    }
    ServerUnaryReactor* Peers(CallbackServerContext* context, const v1::Empty*, v1::PeersReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::peers);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      for (const PeerRow& row : impl_.doors_.peers.rows()) {
        v1::PeerStatus* wire = reply->add_peers();
        wire->set_name(row.name);
        wire->set_address(row.address);
        wire->set_state(kPeerStateNames[static_cast<size_t>(row.state)]);
        wire->set_incarnation(row.incarnation.value());
        wire->set_last_heard_seconds(row.last_heard_seconds);
        wire->set_transport(row.transport);
        wire->set_detail(row.detail);
        for (const std::string& set : row.pool_sets) wire->add_pool_sets(set);
      }
      return impl_.refuse(flight, absl::OkStatus());
    }
    ServerUnaryReactor* AddPeer(CallbackServerContext* context, const v1::AddPeerRequest* request, v1::Empty*) override {
      const Flight flight = impl_.depart(context, Verb::add_peer);
      absl::Status status = impl_.operator_check(context);
      if (status.ok()) status = impl_.doors_.peers.add(request->name(), request->address());
      return impl_.refuse(flight, status);
    }
    ServerUnaryReactor* Resize(CallbackServerContext* context, const v1::ResizeRequest* request, v1::ResizeReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::resize);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      absl::StatusOr<const ServicePoolSet*> set = impl_.set_named(request->pool_set());
      if (!set.ok()) return impl_.refuse(flight, set.status());
      if (request->ratios_size() != 0 && request->ratios_size() != kPoolKinds) {
        return impl_.refuse(flight, make_error(ErrorCode::kInvalid, absl::StrCat("resize: ", request->ratios_size(), " ratios; give ",
                                                                                 kPoolKinds, " (paged, window, state) or none")));
      }
      // What the caller left out is as it is now; the revision makes a change in between a STALE answer, not a surprise.
      Impl& impl = impl_;
      (void)impl.doors_.post(Call<server::Status>{
          {}, [&impl, flight, set = *set, request, reply](absl::StatusOr<Snapshot> snapshot) {
            impl.executor_.run([&impl, flight, set, request, reply, snapshot = std::move(snapshot)] {
              if (!impl.is_open(flight)) return;
              if (!snapshot.ok()) return impl.land(flight, snapshot.status());
              server::Resize resize;
              for (const Snapshot::Set& row : snapshot->sets) {
                if (row.set != set->set) continue;
                resize.set = row.set;
                resize.revision = request->revision() != 0 ? request->revision() : row.revision + 1;
                resize.budget_bytes = request->budget_bytes() != 0 ? request->budget_bytes() : row.budget_bytes;
                resize.ratios = row.ratios;
              }
              for (int i = 0; i < request->ratios_size(); ++i) resize.ratios[static_cast<size_t>(i)] = request->ratios(i);
              resize.dry_run = request->dry_run();
              impl.post(flight, resize, [&impl, reply](const ResizeProgress& progress) { return impl.fill_resize(progress, *reply); });
            });
          }});
      return flight.reactor;
    }
    ServerUnaryReactor* ResizeStatus(CallbackServerContext* context, const v1::PoolSetRequest* request, v1::ResizeReply* reply) override {
      return resize_call<server::ResizeStatus>(context, Verb::resize_status, request, reply);
    }
    ServerUnaryReactor* ResizeAbort(CallbackServerContext* context, const v1::PoolSetRequest* request, v1::ResizeReply* reply) override {
      return resize_call<server::ResizeAbort>(context, Verb::resize_abort, request, reply);
    }
    ServerUnaryReactor* Evict(CallbackServerContext* context, const v1::EvictRequest* request, v1::EvictReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::evict);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      absl::StatusOr<const ServicePoolSet*> set = impl_.set_named(request->pool_set());
      if (!set.ok()) return impl_.refuse(flight, set.status());
      return impl_.post(
          flight, server::Evict{(*set)->set, request->pages(), request->sequence() == 0 ? SequenceId() : SequenceId(request->sequence())},
          [reply](const server::Evict::Reply& evicted) {
            reply->set_pages(evicted.pages);
            return evicted.pages;
          });
    }
    ServerUnaryReactor* Sequences(CallbackServerContext* context, const v1::SequencesRequest* request, v1::SequencesReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::sequences);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      absl::StatusOr<const ServicePoolSet*> set = impl_.set_named(request->pool_set());
      if (!set.ok()) return impl_.refuse(flight, set.status());
      return impl_.post(flight, server::ListSequences{(*set)->set, request->count_max()},
                        [reply](const server::ListSequences::Reply& listed) {
                          for (const server::ListSequences::Row& row : listed.rows) {
                            v1::SequenceRow* wire = reply->add_sequences();
                            wire->set_sequence(row.sequence.value());
                            wire->set_tokens(row.tokens);
                            wire->set_pages(row.pages);
                            wire->set_leases(row.leases);
                          }
                          reply->set_total(listed.total);
                          return int64_t{0};
                        });
    }
    ServerUnaryReactor* Drain(CallbackServerContext* context, const v1::Empty*, v1::Empty*) override {
      const Flight flight = impl_.depart(context, Verb::drain);
      absl::Status status = impl_.operator_check(context);
      if (status.ok()) impl_.doors_.drain();
      return impl_.refuse(flight, status);
    }
    ServerUnaryReactor* Audit(CallbackServerContext* context, const v1::Empty*, v1::Empty*) override {
      const Flight flight = impl_.depart(context, Verb::audit);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      return impl_.post(flight, server::Audit{}, [](const Nothing&) { return int64_t{0}; });
    }
    ServerUnaryReactor* Options(CallbackServerContext* context, const v1::Empty*, v1::OptionsReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::options);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      for (const OptionProvenance& row : impl_.options_.options) {
        v1::OptionValue* wire = reply->add_options();
        wire->set_name(row.name);
        wire->set_value(row.value);
        wire->set_source(row.source);
        wire->set_live(row.live);
      }
      return impl_.refuse(flight, absl::OkStatus());
    }
    ServerUnaryReactor* Probe(CallbackServerContext* context, const v1::ProbeRequest* request, v1::ProbeReply* reply) override {
      const Flight flight = impl_.depart(context, Verb::probe);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      Impl& impl = impl_;
      // The loop recounts everything; the rest is what the node knows of its parts.
      (void)impl.doors_.post(Call<server::Audit>{{}, [&impl, flight, request, reply](absl::StatusOr<Nothing> audited) {
                                                   impl.executor_.run([&impl, flight, request, reply, status = audited.status()] {
                                                     if (!impl.is_open(flight)) return;
                                                     impl.fill_probe(status, flight, *request, *reply);
                                                     impl.land(flight, absl::OkStatus());
                                                   });
                                                 }});
      return flight.reactor;
    }

   private:
    template <class Request>
    ServerUnaryReactor* resize_call(CallbackServerContext* context, Verb verb, const v1::PoolSetRequest* request, v1::ResizeReply* reply) {
      const Flight flight = impl_.depart(context, verb);
      if (absl::Status status = impl_.operator_check(context); !status.ok()) return impl_.refuse(flight, status);
      absl::StatusOr<const ServicePoolSet*> set = impl_.set_named(request->pool_set());
      if (!set.ok()) return impl_.refuse(flight, set.status());
      return impl_.post(flight, Request{(*set)->set},
                        [&impl = impl_, reply](const ResizeProgress& progress) { return impl.fill_resize(progress, *reply); });
    }
    Impl& impl_;
  };

  // ------------------------------------------------------------------------------------------------------ between daemons
  class PeerService final : public v1::Peer::CallbackService {
   public:
    explicit PeerService(Impl& impl) : impl_(impl) {}
    ServerUnaryReactor* Hello(CallbackServerContext* context, const v1::HelloMessage* request, v1::HelloMessage* reply) override {
      return impl_.refuse(impl_.depart(context, Verb::hello), impl_.doors_.peers.on_hello(*request, *reply));
    }
    ServerUnaryReactor* Deliver(CallbackServerContext* context, const v1::PeerEnvelope* request, v1::Empty*) override {
      return impl_.refuse(impl_.depart(context, Verb::deliver), impl_.doors_.peers.on_deliver(*request));
    }

   private:
    Impl& impl_;
  };

  int64_t fill_resize(const ResizeProgress& progress, v1::ResizeReply& reply) {
    wire::put(progress, &reply);
    for (v1::ResizeHolder& holder : *reply.mutable_holders()) {
      const SessionEntry entry = doors_.registry.entry(SessionId(holder.session()));
      holder.set_client(entry.client);
      holder.set_pid(entry.process.pid);
    }
    return 0;
  }

  void fill_status(const Snapshot& snapshot, v1::StatusReply& reply) {
    const NodeStatus node = doors_.status();
    reply.set_node(options_.node);
    reply.set_instance(options_.instance);
    reply.set_build(options_.build);
    reply.set_incarnation(snapshot.incarnation.value());
    reply.set_stopping(snapshot.stopping);
    reply.set_uptime_seconds(node.uptime_seconds);
    reply.set_transport(node.transport);
    reply.set_memory(node.memory);
    for (const Snapshot::Set& set : snapshot.sets) {
      v1::PoolSetStatus* wire = reply.add_sets();
      wire->set_set(set.set.value());
      wire->set_name(set.name);
      const ServicePoolSet* known = nullptr;
      for (const ServicePoolSet& candidate : options_.sets) {
        if (candidate.set == set.set) known = &candidate;
      }
      if (known != nullptr) {
        wire->set_format(known->format);
        wire->set_fingerprint(known->fingerprint);
      }
      for (int kind = 0; kind < kPoolKinds; ++kind) {
        const size_t k = static_cast<size_t>(kind);
        const Occupancy& occupancy = set.pools[k];
        v1::Occupancy* pool = wire->add_pools();
        pool->set_kind(kPoolKindNames[kind]);
        pool->set_free(occupancy.free);
        pool->set_reserved(occupancy.reserved);
        pool->set_sealed_idle(occupancy.sealed_idle);
        pool->set_leased(occupancy.leased);
        pool->set_draining(occupancy.draining);
        pool->set_capacity(occupancy.capacity);
        pool->set_gap(occupancy.gap);
        pool->set_retiring(occupancy.retiring);
        pool->set_chunks(set.chunks[k]);
        if (known != nullptr) {
          pool->set_chunk_bytes(known->shapes[k].chunk_bytes);
          pool->set_page_bytes(known->shapes[k].page_bytes);
        }
      }
      wire->set_named_pages(set.named_pages);
      wire->set_sequences(set.sequences);
      wire->set_resume_points(set.resume_points);
      wire->set_revision(set.revision);
      wire->set_budget_bytes(set.budget_bytes);
      for (int64_t ratio : set.ratios) wire->add_ratios(ratio);
    }
    for (const Snapshot::SessionRow& row : snapshot.sessions) {
      v1::SessionStatus* wire = reply.add_sessions();
      const SessionEntry entry = doors_.registry.entry(row.session);
      wire->set_session(row.session.value());
      wire->set_client(entry.client);
      wire->set_pid(row.process.pid);
      wire->set_uid(row.process.uid);
      wire->set_silent(row.silent);
      wire->set_tickets(row.tickets);
      wire->set_leases(row.leases);
      wire->set_pinned_pages(row.pinned_pages);
      wire->set_pool_set(entry.pool_set);
    }
    reply.set_tickets_open(snapshot.tickets_open);
    reply.set_leases_open(snapshot.leases_open);
    reply.set_ships_open(snapshot.ships_open);
    reply.set_bytes_in_flight(snapshot.bytes_in_flight);
    for (const auto& [name, value] : snapshot.counters) {
      v1::Counter* wire = reply.add_counters();
      wire->set_name(name);
      wire->set_value(value);
    }
    for (const ServiceFacet& facet : node.facets) {
      v1::Facet* wire = reply.add_facets();
      wire->set_name(facet.name);
      wire->set_serving(facet.serving);
      wire->set_detail(facet.detail);
    }
  }

  void fill_probe(const absl::Status& audited, const Flight& flight, const v1::ProbeRequest& request, v1::ProbeReply& reply) {
    const auto step = [&reply](const std::string& name, bool passed, const std::string& detail, double seconds) {
      v1::ProbeStep* wire = reply.add_steps();
      wire->set_name(name);
      wire->set_passed(passed);
      wire->set_detail(detail);
      wire->set_seconds(seconds);
    };
    step("accounting", audited.ok(), audited.ok() ? "every count equals a recount" : std::string(audited.message()),
         static_cast<double>(doors_.clock.now_ns() - flight.started_ns) * 1e-9);
    for (const ServiceFacet& facet : doors_.status().facets) step(facet.name, facet.serving, facet.detail, 0);
    if (request.peer().empty()) return;
    bool found = false;
    for (const PeerRow& row : doors_.peers.rows()) {
      if (row.name != request.peer()) continue;
      found = true;
      step("peer " + row.name, row.state == PeerState::kUp,
           absl::StrCat(kPeerStateNames[static_cast<size_t>(row.state)], " at ", row.address, row.detail.empty() ? "" : ": ", row.detail),
           row.last_heard_seconds);
      for (const ServicePoolSet& set : options_.sets) {
        const absl::Status format = doors_.peers.check_format(row.node, set.name);
        step("format " + set.name, format.ok(), format.ok() ? "equal" : std::string(format.message()), 0);
      }
    }
    if (!found) step("peer " + request.peer(), false, "not known here", 0);
  }

  const ServiceOptions options_;
  ServiceDoors doors_;
  Mutex mutex_;
  Condition landed_;
  std::map<uint64_t, Flight> open_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_flight_ ABSL_GUARDED_BY(mutex_) = 1;
  std::atomic<uint64_t> next_read_lease_{uint64_t{1} << 63};  // apart from callers' random ids, which repeat never in practice
  Executor executor_;
  Mutex read_mutex_;        // held while a read writes its reply
  Executor read_executor_;  // reads take milliseconds; other verbs' answers don't wait for them
  NeedleService needle_;
  OperatorService operator_;
  PeerService peer_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<GrpcDoor> door_;
};

std::string service_libraries() {
  constexpr int kVersion = GOOGLE_PROTOBUF_VERSION;  // 3021012
  return absl::StrCat("gRPC ", grpc::Version(), ", protobuf ", kVersion / 1'000'000, ".", kVersion / 1000 % 1000, ".", kVersion % 1000);
}

Service::Service(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Service::~Service() = default;

absl::StatusOr<std::unique_ptr<Service>> Service::start(ServiceOptions options, ServiceDoors doors) {
  auto impl = std::make_unique<Impl>(std::move(options), std::move(doors));
  if (absl::Status status = impl->start(); !status.ok()) return status;
  return std::unique_ptr<Service>(new Service(std::move(impl)));
}

void Service::set_serving(const std::string& facet, bool serving) { impl_->set_serving(facet, serving); }
void Service::stop(int64_t deadline_ms) { impl_->stop(deadline_ms); }

}  // namespace needle::server
