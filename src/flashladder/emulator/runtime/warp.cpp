// Warp collectives: lanes meet by mask, the last one to come does the work for all.
#include "state.h"

namespace emu {
namespace {

void complete_meeting(WarpState& w, size_t i) {
  const Meeting m = w.meetings[i];
  w.meetings.erase(w.meetings.begin() + static_cast<std::ptrdiff_t>(i));
  if (options.races && m.arrived == w.live) banks::flush_warp(w.index);
  m.complete(m.argument, m.arrived, w);
  for (uint32_t lanes = m.arrived; lanes; lanes &= lanes - 1) {
    const uint32_t thread = w.first_thread + static_cast<uint32_t>(__builtin_ctz(lanes));
    if (threads[thread].status == Status::blocked) wake(thread);
  }
}

template <class F>
void for_lanes(uint32_t lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(static_cast<uint32_t>(__builtin_ctz(lanes)));
}

constexpr uint32_t kUndefined = 0xdeadbeef;  // read from a lane that takes no part

}  // namespace

void collective(uint32_t op, const char* name, uint32_t mask, void* argument, Complete complete, Loc loc) {
  ThreadState& t = me();
  WarpState& w = my_warp();
  const uint32_t bit = 1u << t.lane;
  if (!(mask & bit)) fail(loc, "%s: the calling lane %u is not in the mask 0x%08x", name, t.lane, mask);
  size_t i = 0;
  for (; i < w.meetings.size(); ++i) {
    const Meeting& m = w.meetings[i];
    if (!(m.mask & mask)) continue;
    if (m.mask != mask || m.code != op)
      fail(loc, "%s (mask 0x%08x) meets %s (mask 0x%08x) of the same warp at %s: the warp has diverged", name, mask,
           m.name, m.mask, place(m.loc).c_str());
    break;
  }
  if (i == w.meetings.size()) w.meetings.push_back({op, name, mask, 0, complete, loc, {}});
  Meeting& m = w.meetings[i];
  m.arrived |= bit;
  m.argument[t.lane] = argument;
  if (m.arrived == (mask & w.live)) {
    complete_meeting(w, i);
    return;
  }
  block_current({name, " with mask 0x%08x", mask, loc});
}

void aligned_collective(uint32_t op, const char* name, void* argument, Complete complete, Loc loc) {
  if (my_warp().live != kFullWarp)
    fail(loc, "%s needs all 32 lanes of the warp; those alive are 0x%08x", name, my_warp().live);
  collective(op, name, kFullWarp, argument, complete, loc);
}

// Exited lanes count as arrived, except for aligned collectives.
void finish_meetings(WarpState& w) {
  for (size_t i = 0; i < w.meetings.size();) {
    const Meeting& m = w.meetings[i];
    const auto op = static_cast<Op>(m.code & 31);
    if (op >= Op::ldmatrix) {
      fail(m.loc, "%s: a lane of the warp exits instead of taking part", m.name);
    }
    if (m.arrived == (m.mask & w.live)) {
      complete_meeting(w, i);
      i = 0;
    } else {
      ++i;
    }
  }
}

void sync_warp(uint32_t mask, Loc loc) {
  collective(
      code(Op::sync_warp), "bar.warp.sync", mask, nullptr,
      [](void* const*, uint32_t lanes, WarpState& w) {
        if (!options.races) return;
        std::vector<uint32_t> members;
        for_lanes(lanes, [&](uint32_t lane) { members.push_back(w.first_thread + lane); });
        race::synchronise(members);
      },
      loc);
}

// --- values ------------------------------------------------------------------------------------------------------

namespace {

struct ShuffleArgument {
  uint32_t value, source, result;
};

}  // namespace

uint32_t shuffle(Shuffle mode, uint32_t value, uint32_t lane_operand, uint32_t clamp, uint32_t mask, bool* in_range,
                 Loc loc) {
  const uint32_t lane = current->lane, b = lane_operand & 31, c = clamp & 31, segment = clamp >> 8 & 31;
  const uint32_t last = (lane & segment) | (c & ~segment), first = lane & segment;
  int64_t source = 0;
  bool inside = false;
  switch (mode) {
    case Shuffle::up:
      source = static_cast<int64_t>(lane) - b;
      inside = source >= static_cast<int64_t>(last);
      break;
    case Shuffle::down:
      source = lane + b;
      inside = source <= last;
      break;
    case Shuffle::bfly:
      source = lane ^ b;
      inside = source <= last;
      break;
    case Shuffle::idx:
      source = first | (b & ~segment);
      inside = source <= last;
      break;
  }
  if (!inside) source = lane;
  if (in_range) *in_range = inside;
  ++counters.shuffles;
  ShuffleArgument argument{value, static_cast<uint32_t>(source), 0};
  collective(
      code(Op::shuffle, static_cast<uint32_t>(mode)), "shfl.sync", mask, &argument,
      [](void* const* arguments, uint32_t lanes, WarpState&) {
        for_lanes(lanes, [&](uint32_t i) {
          auto& a = *static_cast<ShuffleArgument*>(arguments[i]);
          const bool there = lanes >> a.source & 1;
          a.result = there ? static_cast<ShuffleArgument*>(arguments[a.source])->value : kUndefined;
        });
      },
      loc);
  return argument.result;
}

namespace {

struct ValueArgument {
  uint64_t value;
  uint32_t result;
  uint32_t mode;
};

ValueArgument& value_of(void* argument) { return *static_cast<ValueArgument*>(argument); }

uint32_t combine(Redux op, uint32_t a, uint32_t b) {
  const auto sa = static_cast<int32_t>(a), sb = static_cast<int32_t>(b);
  switch (op) {
    case Redux::add:
      return a + b;
    case Redux::min_u:
      return a < b ? a : b;
    case Redux::max_u:
      return a > b ? a : b;
    case Redux::min_s:
      return sa < sb ? a : b;
    case Redux::max_s:
      return sa > sb ? a : b;
    case Redux::and_:
      return a & b;
    case Redux::or_:
      return a | b;
    case Redux::xor_:
      return a ^ b;
  }
  __builtin_trap();
}

}  // namespace

uint32_t vote(Vote mode, bool predicate, uint32_t mask, Loc loc) {
  ValueArgument argument{predicate, 0, static_cast<uint32_t>(mode)};
  collective(
      code(Op::vote, argument.mode), "vote.sync", mask, &argument,
      [](void* const* arguments, uint32_t lanes, WarpState&) {
        uint32_t ballot = 0;
        for_lanes(lanes, [&](uint32_t i) { ballot |= static_cast<uint32_t>(value_of(arguments[i]).value) << i; });
        for_lanes(lanes, [&](uint32_t i) {
          ValueArgument& a = value_of(arguments[i]);
          switch (static_cast<Vote>(a.mode)) {
            case Vote::any:
              a.result = ballot != 0;
              break;
            case Vote::all:
              a.result = ballot == lanes;
              break;
            case Vote::uni:
              a.result = ballot == 0 || ballot == lanes;
              break;
            case Vote::ballot:
              a.result = ballot;
              break;
          }
        });
      },
      loc);
  return argument.result;
}

uint32_t redux(Redux op, uint32_t value, uint32_t mask, Loc loc) {
  ValueArgument argument{value, 0, static_cast<uint32_t>(op)};
  collective(
      code(Op::redux, argument.mode), "redux.sync", mask, &argument,
      [](void* const* arguments, uint32_t lanes, WarpState&) {
        const uint32_t first = static_cast<uint32_t>(__builtin_ctz(lanes));
        uint32_t result = static_cast<uint32_t>(value_of(arguments[first]).value);
        const auto mode = static_cast<Redux>(value_of(arguments[first]).mode);
        for_lanes(lanes & ~(1u << first), [&](uint32_t i) {
          result = combine(mode, result, static_cast<uint32_t>(value_of(arguments[i]).value));
        });
        for_lanes(lanes, [&](uint32_t i) { value_of(arguments[i]).result = result; });
      },
      loc);
  return argument.result;
}

uint32_t match_any(uint64_t value, uint32_t mask, Loc loc) {
  ValueArgument argument{value, 0, 0};
  collective(
      code(Op::match), "match.any.sync", mask, &argument,
      [](void* const* arguments, uint32_t lanes, WarpState&) {
        for_lanes(lanes, [&](uint32_t i) {
          for_lanes(lanes, [&](uint32_t j) {
            if (value_of(arguments[i]).value == value_of(arguments[j]).value) value_of(arguments[i]).result |= 1u << j;
          });
        });
      },
      loc);
  return argument.result;
}

// The hardware may run any set of lanes together; a lone lane is the set that assumes least.
uint32_t active_mask() { return 1u << current->lane; }

bool elect(uint32_t mask, Loc loc) {
  ValueArgument argument{0, 0, 0};
  collective(
      code(Op::elect), "elect.sync", mask, &argument,
      [](void* const* arguments, uint32_t lanes, WarpState&) {
        const bool any = options.schedule >= static_cast<int32_t>(Schedule::random);
        uint32_t skip = any ? random_below(static_cast<uint32_t>(__builtin_popcount(lanes))) : 0, rest = lanes;
        while (skip--) rest &= rest - 1;
        value_of(arguments[__builtin_ctz(rest)]).result = 1;
      },
      loc);
  return argument.result != 0;
}

}  // namespace emu
