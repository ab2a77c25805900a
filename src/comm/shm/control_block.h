// What ranks see of each other: words and slots in memory that every rank of a group maps. Fresh pages are
// zero, which is the initial state of everything here.
//
// [Note: Shared atomics] Every word that more than one rank touches is a lock-free std::atomic, used with
// sequential consistency: the doorbell protocol below needs store-then-load order, and thread sanitizer
// understands atomics but no fences.
#pragma once

#include "comm/call_descriptor.h"

#include <zeroth/base/platform.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/device/memory.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace zeroth::detail {

using SharedWord = std::atomic<std::uint64_t>;
using SharedFlag = std::atomic<std::uint32_t>;
static_assert(SharedWord::is_always_lock_free && SharedFlag::is_always_lock_free,
              "atomics with locks do not work between processes");

inline constexpr std::size_t kAbortTextBytes = 1024;
inline constexpr std::size_t kLossTextBytes = 512;

/// One per rank of the job, at the start of its world segment.
///
/// [Note: Doorbell] A sleeper adds 1 to `waiting`, reads `doorbell`, looks once more at what it waits for,
/// and sleeps in a futex as long as `doorbell` has that value. A writer stores its data, reads `waiting`, and
/// if that is not 0 adds 1 to `doorbell` and wakes. All four accesses are sequentially consistent, so one of
/// the two sees the other: no wake-up is lost, and a writer pays one load per peer while nobody sleeps.
struct JobControl {
  alignas(kCacheLineBytes) SharedFlag doorbell;
  SharedFlag waiting;
  alignas(kCacheLineBytes) SharedWord heartbeat;      ///< grows every 100 ms while the process runs
  alignas(kCacheLineBytes) ShownAction action;        ///< the last one of a pipeline, for when the process is no more
  alignas(kCacheLineBytes) SharedFlag first_abort;    ///< used in rank 0's block: 1 + the rank that called abort first
  alignas(kCacheLineBytes) SharedFlag abort_claimed;  ///< set by the thread that writes the next two
  std::int32_t abort_code;
  char abort_text[kAbortTextBytes];
  /// The lost peer that made this rank give up, as a sentence; written before `loss_told`, and that before `departed`.
  char loss_text[kLossTextBytes];
  SharedFlag loss_told;
};

/// One call with its payload, if that is small.
struct alignas(kCacheLineBytes) CallSlot {
  CallDescriptor descriptor;
  alignas(kCacheLineBytes) std::byte payload[kInlineBytes];
};

/// One per rank and group, at the start of the group's segment (after JobControl in the world's). Only its
/// owner writes it.
///
/// [Note: Two slots] Call s lies in slot s % 2. A rank writes slot s % 2 again for call s + 2, after it has
/// seen every rank's post of call s + 1; a rank posts s + 1 after it has read everything of call s. So two
/// slots are enough.
struct GroupControl {
  alignas(kCacheLineBytes) SharedWord posted;    ///< calls posted
  alignas(kCacheLineBytes) SharedWord staged;    ///< rounds of staging filled, over all calls
  alignas(kCacheLineBytes) SharedWord consumed;  ///< rounds of staging of the others that this rank has used
  alignas(kCacheLineBytes) SharedWord reduced;  ///< 1 + last call whose own part of an all_reduce is ready to be pulled
  alignas(kCacheLineBytes) SharedWord finished;  ///< 1 + last call whose peers' windows this rank no longer reads
  alignas(kCacheLineBytes) SharedFlag departed;  ///< the group was given up
  /// Set before the first post, if the rank has read the next two of every other one. See [Note: Private memory].
  SharedFlag reads_private;
  std::uint64_t probe_at;     ///< where a word in private memory of the owner lies
  std::uint64_t probe_value;  ///< and what it is
  CallSlot slots[2];
};

/// What a rank says to one other rank of the group about the messages between them; one a pair and direction of speech.
/// Only its owner writes it.
///
/// [Note: Rings] Messages from one rank to another are a stream of bytes, headers and data, in a ring of kRingBytes in
/// the sender's segment. `filled` bytes have been put into it, `taken` (the receiver's word) of them have been read:
/// what fits is sent at once, and a message of any length flows through. Data that the receiver can read where it lies
/// does not: its header says where that is, the receiver reads it there, and the message is done with `received`.
///
/// [Note: Given up] A sender that gives unfinished messages up says so before their memory can be used again. The
/// receiver looks after it has read: what it has read before it sees the word is what was sent.
struct alignas(kCacheLineBytes) PeerLink {
  SharedWord filled;                          ///< bytes put into the ring towards the other rank
  SharedWord given_up;                        ///< 1 + the first message to the other rank that was given up, 0: none
  alignas(kCacheLineBytes) SharedWord taken;  ///< bytes read from the other rank's ring towards this one
  SharedWord received;                        ///< messages from the other rank that have arrived
  SharedFlag refused;                         ///< set after the next two, when they differ
  CallDescriptor wanted;                      ///< this rank's recv
  CallDescriptor offered;                     ///< the other rank's send
};

inline constexpr std::size_t kRingBytes = std::size_t{64} << 10U;

inline constexpr std::size_t kJobControlBytes = (sizeof(JobControl) + kPageBytes - 1) / kPageBytes * kPageBytes;
inline constexpr std::size_t kGroupControlBytes = (sizeof(GroupControl) + kPageBytes - 1) / kPageBytes * kPageBytes;

}  // namespace zeroth::detail
