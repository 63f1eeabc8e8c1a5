// needlectl's end of a daemon's RPCs, and how a command ends that is refused.
//
// What must stay true:
//  1. A refusal carries the daemon's own words and the exit status that its error stands for (main.cc lists them).
//  2. A session that was opened ends with this object: what it reserved or leased is given back now, not by silence.
#pragma once

#include <grpcpp/grpcpp.h>
#include <sys/random.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "proto/attach.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"

namespace needle {

enum Exit { kDone = 0, kRefused = 1, kUsage = 2, kUnreachable = 3, kRetryLater = 4, kDeferred = 5 };

inline constexpr int64_t kCallMs = 5'000;

// A refused call ends the command with the status that its error stands for.
struct Refusal {
  int exit = kRefused;
  std::string message;
};

inline uint64_t random_id() {
  uint64_t id = 0;
  while (id == 0) {
    if (getrandom(&id, sizeof id, 0) != sizeof id) throw Refusal{kRefused, "the kernel gives no random numbers"};
  }
  return id;
}

class Daemon {
 public:
  explicit Daemon(const std::string& target) : target_(target), channel_(grpc::CreateChannel(target, grpc::InsecureChannelCredentials())) {}

  template <class Stub, class Request, class Reply>
  Reply call(grpc::Status (Stub::*verb)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
             int64_t deadline_ms = kCallMs) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    if (session_ != 0) {
      context.AddMetadata(attach::kSessionMetadata, std::to_string(session_));
      context.AddMetadata(attach::kSecretMetadata, secret_);
    }
    Stub stub(channel_);
    Reply reply;
    const grpc::Status status = (stub.*verb)(&context, request, &reply);
    if (status.ok()) return reply;
    const auto& trailing = context.GetServerTrailingMetadata();
    const auto name = trailing.find(attach::kErrorMetadata);
    int exit = kRefused;
    if (name != trailing.end()) {
      const std::optional<ErrorCode> code = error_of_name({name->second.data(), name->second.size()});
      if (code.has_value() && error_row(*code).action == ErrorAction::kRetry) exit = kRetryLater;
    } else if (status.error_code() == grpc::StatusCode::UNAVAILABLE || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      throw Refusal{kUnreachable,
                    "no answer from " + target_ + ": " + status.error_message() + ". Is needled running, and is --socket its grpc.sock?"};
    }
    const std::string& message = status.error_message();
    throw Refusal{exit, message.empty() ? "gRPC status " + std::to_string(status.error_code()) + " without a word" : message};
  }

  // A refused command ends its session too: what it reserved or leased is given back now, not by silence.
  ~Daemon() { close_session(); }

  const std::string& target() const { return target_; }

  // Rights of a remote client, for ship, topk and probe. They end with this object or by silence.
  void open_session(const std::string& pool_set) {
    v1::OpenSessionRequest request;
    request.set_pool_set(pool_set);
    request.set_client("needlectl");
    close_session();
    const v1::OpenSessionReply reply = call(&v1::Needle::Stub::OpenSession, request);
    session_ = reply.session();
    secret_ = reply.secret();
  }

  void close_session() {
    if (session_ == 0) return;
    try {
      call(&v1::Needle::Stub::CloseSession, v1::Empty());
    } catch (const Refusal&) {
      // It fell silent and is gone, or it will be: the command's own outcome is what the operator needs.
    }
    session_ = 0;
  }

 private:
  std::string target_;
  std::shared_ptr<grpc::Channel> channel_;
  uint64_t session_ = 0;
  std::string secret_;
};

}  // namespace needle
