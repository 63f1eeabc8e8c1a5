// The one table of errors: what a code means and what its caller does about it.
//
// What must stay true:
//  1. A code exists only because a caller acts differently on it. The action is part of the contract.
//  2. A message names the value, the limit and what to do; it never carries cached bytes or secrets.
//  3. The code travels beside the absl code as a payload, so an RPC edge translates without reading prose.
//
// Callers must not compare messages, and must treat an absl::Status without our payload as kBug.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace needle {

enum class ErrorAction : uint8_t {
  kRetry,   // the same request again, not before the hint `retry_after_ms`
  kReplan,  // ask again from the start: look up, reserve or attach anew
  kGiveUp,  // it can't succeed as asked; tell the one who asked
  kDone,    // it was done before; go on as after a success
};

enum class ErrorCode : uint8_t {
  kStale,
  kConsumed,
  kLeaseExpired,
  kEpochChanged,
  kNotFound,
  kOutOfPages,
  kBusy,
  kFormatMismatch,
  kWrongOwner,
  kInvalid,
  kConflict,
  kImpossible,
  kPeerLost,
  kCorrupt,
  kCancelled,
  kForfeited,
  kStopping,
  kMemory,
  kBug,
};

struct ErrorRow {
  ErrorCode code;
  const char* name;  // the same word in logs, metrics and on the wire
  absl::StatusCode status;
  ErrorAction action;
  const char* meaning;
};

inline constexpr std::array<ErrorRow, 19> kErrorTable = {{
    {ErrorCode::kStale, "STALE", absl::StatusCode::kFailedPrecondition, ErrorAction::kReplan,
     "the handle names an earlier generation, session or incarnation"},
    {ErrorCode::kConsumed, "CONSUMED", absl::StatusCode::kAlreadyExists, ErrorAction::kDone,
     "the ticket or lease has already ended; its first outcome holds"},
    {ErrorCode::kLeaseExpired, "LEASE_EXPIRED", absl::StatusCode::kDeadlineExceeded, ErrorAction::kReplan,
     "the lease ended before the read did; the bytes read must not be used"},
    {ErrorCode::kEpochChanged, "EPOCH_CHANGED", absl::StatusCode::kFailedPrecondition, ErrorAction::kReplan,
     "the pool lost its bytes; attach again"},
    {ErrorCode::kNotFound, "NOT_FOUND", absl::StatusCode::kNotFound, ErrorAction::kReplan, "no such sequence, page, pool or peer here"},
    {ErrorCode::kOutOfPages, "OUT_OF_PAGES", absl::StatusCode::kResourceExhausted, ErrorAction::kRetry,
     "every page is reserved, leased or draining; nothing was reserved"},
    {ErrorCode::kBusy, "BUSY", absl::StatusCode::kUnavailable, ErrorAction::kRetry,
     "a bounded queue or table is full; nothing was changed"},
    {ErrorCode::kFormatMismatch, "FORMAT_MISMATCH", absl::StatusCode::kInvalidArgument, ErrorAction::kGiveUp,
     "the two sides' page formats differ; both are printed"},
    {ErrorCode::kWrongOwner, "WRONG_OWNER", absl::StatusCode::kPermissionDenied, ErrorAction::kGiveUp,
     "the ticket, lease or page belongs to another session"},
    {ErrorCode::kInvalid, "INVALID", absl::StatusCode::kInvalidArgument, ErrorAction::kGiveUp,
     "the request is malformed or beyond a limit; nothing was changed"},
    {ErrorCode::kConflict, "CONFLICT", absl::StatusCode::kAborted, ErrorAction::kRetry, "another operation of this kind is under way"},
    {ErrorCode::kImpossible, "IMPOSSIBLE", absl::StatusCode::kOutOfRange, ErrorAction::kGiveUp, "no state of the system could satisfy it"},
    {ErrorCode::kPeerLost, "PEER_LOST", absl::StatusCode::kUnavailable, ErrorAction::kReplan, "the other daemon fell silent or restarted"},
    {ErrorCode::kCorrupt, "CORRUPT", absl::StatusCode::kDataLoss, ErrorAction::kReplan, "a checksum differs; nothing was published"},
    {ErrorCode::kCancelled, "CANCELLED", absl::StatusCode::kCancelled, ErrorAction::kGiveUp, "the caller took it back"},
    {ErrorCode::kForfeited, "FORFEITED", absl::StatusCode::kAborted, ErrorAction::kReplan,
     "the sequence's writer gave up before it sealed"},
    {ErrorCode::kStopping, "STOPPING", absl::StatusCode::kUnavailable, ErrorAction::kReplan,
     "this daemon drains and takes nothing new; use another"},
    {ErrorCode::kMemory, "MEMORY", absl::StatusCode::kResourceExhausted, ErrorAction::kGiveUp,
     "memory could not be allocated or registered; the reason is in the message"},
    {ErrorCode::kBug, "BUG", absl::StatusCode::kInternal, ErrorAction::kGiveUp, "an error without a code of ours"},
}};

constexpr const ErrorRow& error_row(ErrorCode code) { return kErrorTable[static_cast<size_t>(code)]; }

inline constexpr char kErrorPayload[] = "needle.v1/error";
inline constexpr char kRetryAfterPayload[] = "needle.v1/retry_after_ms";

// `message` says value, limit and remedy. A retry hint may be given for kRetry codes alone.
inline absl::Status make_error(ErrorCode code, const std::string& message, int64_t retry_after_ms = 0) {
  const ErrorRow& row = error_row(code);
  absl::Status status(row.status, std::string(row.name) + ": " + message);
  status.SetPayload(kErrorPayload, absl::Cord(row.name));
  if (retry_after_ms > 0) status.SetPayload(kRetryAfterPayload, absl::Cord(std::to_string(retry_after_ms)));
  return status;
}

// The code that a peer or client names; absent for a name that is none of ours.
inline std::optional<ErrorCode> error_of_name(std::string_view name) {
  for (const ErrorRow& row : kErrorTable) {
    if (name == row.name) return row.code;
  }
  return std::nullopt;
}

// Absent for an OK status; kBug for a failure that was not made here.
inline std::optional<ErrorCode> error_code(const absl::Status& status) {
  if (status.ok()) return std::nullopt;
  const absl::optional<absl::Cord> payload = status.GetPayload(kErrorPayload);
  if (!payload.has_value()) return ErrorCode::kBug;
  return error_of_name(std::string(*payload)).value_or(ErrorCode::kBug);
}

inline bool is_error(const absl::Status& status, ErrorCode code) {
  const std::optional<ErrorCode> found = error_code(status);
  return found.has_value() && *found == code;
}

// Milliseconds as the wire carries them, in decimal digits; 0 for anything else, and for more than a day.
inline int64_t parse_retry_after_ms(std::string_view digits) {
  constexpr int64_t kDayMs = 86'400'000;
  int64_t value = 0;
  for (char digit : digits) {
    if (digit < '0' || digit > '9') return 0;
    value = value * 10 + (digit - '0');
    if (value > kDayMs) return 0;
  }
  return value;
}

// 0 when the status carries no hint or a malformed one.
inline int64_t retry_after_ms(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryAfterPayload);
  return payload.has_value() ? parse_retry_after_ms(std::string(*payload)) : 0;
}

// The message without the name that make_error() puts in front.
inline std::string_view message_without_name(ErrorCode code, std::string_view message) {
  const std::string prefix = std::string(error_row(code).name) + ": ";
  if (message.substr(0, prefix.size()) == prefix) message.remove_prefix(prefix.size());
  return message;
}

// An error as it was made at the other end, from its message there.
inline absl::Status error_from_wire(ErrorCode code, std::string_view message, int64_t retry_after_ms) {
  return make_error(code, std::string(message_without_name(code, message)), retry_after_ms);
}

}  // namespace needle
