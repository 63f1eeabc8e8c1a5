// Ids and positions as distinct types: a page index cannot be passed where a lease id is wanted.
//
// What must stay true:
//  1. No implicit conversion in either direction; `value()` and the explicit constructor are the only doors.
//  2. An id is trivially copyable and as large as its representation, so it may lie in records and on the wire.
//  3. Default construction gives the type's "none", which is never handed out.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

namespace needle {

template <class Tag, class Representation, Representation kNoneValue>
class Id {
 public:
  using representation = Representation;

  constexpr Id() = default;
  constexpr explicit Id(Representation value) : value_(value) {}

  static constexpr Id none() { return Id(); }
  constexpr Representation value() const { return value_; }
  constexpr bool is_none() const { return value_ == kNoneValue; }

  friend constexpr auto operator<=>(Id, Id) = default;

  template <class Hash>
  friend Hash AbslHashValue(Hash state, Id id) {
    return Hash::combine(static_cast<Hash&&>(state), id.value_);
  }

 private:
  Representation value_ = kNoneValue;
};

using PoolId = Id<struct PoolIdTag, uint32_t, 0xFFFFFFFFu>;
using PageIndex = Id<struct PageIndexTag, uint32_t, 0xFFFFFFFFu>;    // position of a page in its pool
using Generation = Id<struct GenerationTag, uint32_t, 0u>;           // of a page; grows each time it is reserved
using ChunkIndex = Id<struct ChunkIndexTag, uint32_t, 0xFFFFFFFFu>;  // position of a chunk in its pool
using Epoch = Id<struct EpochTag, uint64_t, 0u>;                     // of a pool; changes when its bytes were lost
using Incarnation = Id<struct IncarnationTag, uint64_t, 0u>;         // of a daemon process; changes at every start
using TicketId = Id<struct TicketIdTag, uint64_t, 0u>;
using LeaseId = Id<struct LeaseIdTag, uint64_t, 0u>;
using SessionId = Id<struct SessionIdTag, uint64_t, 0u>;  // an attached client or a peer's session
using SequenceId = Id<struct SequenceIdTag, uint64_t, 0u>;
using NodeId = Id<struct NodeIdTag, uint32_t, 0xFFFFFFFFu>;

// A sealed page's name inside one pool. Equal index with another generation is another page.
struct PageId {
  PageIndex index;
  Generation generation;
  friend constexpr auto operator<=>(const PageId&, const PageId&) = default;
};

static_assert(sizeof(PageId) == 8, "page ids lie in records and on the wire");
static_assert(std::is_trivially_copyable_v<PageId>);

}  // namespace needle

template <class Tag, class Representation, Representation kNoneValue>
struct std::hash<needle::Id<Tag, Representation, kNoneValue>> {
  size_t operator()(needle::Id<Tag, Representation, kNoneValue> id) const noexcept { return std::hash<Representation>()(id.value()); }
};
