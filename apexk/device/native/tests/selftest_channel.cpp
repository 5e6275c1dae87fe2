#include "selftest_channel.h"

namespace {

using Bench = ChannelBench;

void exact_copies() {
  Bench bench;
  apexk_copy copies[] = {bench.copy(0, 0, 3), bench.copy(1, 1, 2)};
  const apexk_event start = bench.fake.event();
  OK(bench.exact(copies, 2, start));
  NEED(copies[0].error == 0 && copies[1].error == 0, "errors %d %d", copies[0].error, copies[1].error);
  OK(bench.fake.api.event_synchronize(bench.done[1]));
  NEED(holds(bench.slot(3), 0) && holds(bench.slot(2), 1), "a copy is not there behind the event of both");
  NEED(holds(bench.slot(1), 101), "the slot beside them");
  int64_t began, ended;
  OK(apexk_fake_event_ns(start, &began));
  OK(apexk_fake_event_ns(bench.done[1], &ended));
  NEED(began < ended, "start was not recorded ahead of done");
}

// A slot's last reader is held up: neither kind of copy may overwrite what it still has to read.
void write_after_read() {
  for (const bool speculative : {false, true}) {
    Bench bench;
    Gate gate;
    bool intact = false;
    std::function<void()> reader = [&] { intact = holds(bench.slot(0), 100); };
    const apexk_event read = bench.fake.event();
    gate.close(bench.compute);
    launch(bench.compute, &reader);
    OK(bench.fake.api.event_record(read, bench.compute));
    apexk_copy copy = bench.copy(0, 0, 0, 1, read);
    if (speculative) {
      bench.speculate({copy});
    } else {
      OK(bench.exact(&copy, 1));
    }
    sleep_ms(5);  // time in which a copy that does not wait would be done
    if (speculative) NEED(apexk_channel_in_flight(bench.channel) == 0, "a copy has begun before its slot was read");
    gate.open();
    if (speculative) {
      bench.land(1);
    } else {
      OK(bench.fake.api.event_synchronize(bench.done[0]));
    }
    NEED(intact, "a slot was overwritten before it was read");
    NEED(holds(bench.slot(0), 0), "the copy is not there");
    bench.clean();
  }
}

void copies_that_wait_can_be_dropped() {
  Bench bench;
  Gate gate;
  const apexk_event never = bench.fake.event();
  gate.close(bench.compute);
  OK(bench.fake.api.event_record(never, bench.compute));
  bench.speculate({bench.copy(0, 0, 0, 1, never)});
  sleep_ms(1);
  bench.stop(1);
  NEED(bench.stopped.running == -1 && bench.stopped.landed == 0, "a copy that waits has not begun");
  bench.speculate({bench.copy(1, 1, 1, 1)});
  bench.land(1);
  gate.open();
  OK(bench.fake.api.stream_synchronize(bench.compute));
  NEED(holds(bench.slot(0), 100) && holds(bench.slot(1), 1), "the dropped copy was made, or the other was not");
}

void newest_queue_first() {
  Bench bench;
  Gate gate;
  gate.close(bench.stream);
  bench.speculate({bench.copy(0, 0, 0, 5), bench.copy(1, 1, 1, 5)});
  bench.begin();
  bench.speculate({bench.copy(2, 2, 2, 1), bench.copy(3, 3, 3, 1)});
  gate.open();
  bench.land(4);
  const int64_t expected[] = {0, 2, 3, 1};
  NEED(std::equal(expected, expected + 4, bench.tags), "order %ld %ld %ld %ld", (long)bench.tags[0], (long)bench.tags[1],
       (long)bench.tags[2], (long)bench.tags[3]);
  for (int i = 0; i < 4; i++) NEED(holds(bench.slot(i), i), "slot %d", i);
}

// With the stream held up: at most a chunk is ahead of an exact copy, and no call waits for the device.
void overtaken_within_a_chunk() {
  Bench bench;
  Gate gate;
  gate.close(bench.stream);
  bench.speculate({bench.copy(0, 0, 0, 1), bench.copy(1, 1, 1, 1), bench.copy(2, 2, 2, 2)});
  bench.begin();
  sleep_ms(2);
  NEED(apexk_channel_in_flight(bench.channel) == kChunk, "%lu bytes in flight", (unsigned long)apexk_channel_in_flight(bench.channel));
  apexk_copy exact = bench.copy(3, 3, 3);
  OK(bench.exact(&exact, 1));
  bench.stop(1);
  NEED(bench.stopped.running == 0 && bench.stopped.left == kBlock && bench.stopped.landed == 0, "running %ld, left %lu",
       (long)bench.stopped.running, (unsigned long)bench.stopped.left);
  NEED(apexk_channel_abandon(bench.channel, 7) == APEXK_TRANSFER_BAD_ARGUMENT, "a stranger's tag");
  OK(apexk_channel_keep(bench.channel, 0, &bench.error));
  gate.open();
  OK(bench.fake.api.event_synchronize(bench.done[0]));
  NEED(holds(bench.slot(0), 0) && holds(bench.slot(3), 3), "a kept copy, and the exact one before its end");
  bench.land(1);
  NEED(bench.tags[0] == 2 && holds(bench.slot(2), 2), "a copy of a later layer goes on");
  NEED(holds(bench.slot(1), 101), "a dropped copy was made");
  bench.clean();
}

// Landed means landed: what a stop reports is there, without an event.
void landed_is_there() {
  Bench bench({.link_bytes_per_s = 200e6, .delay_us = 300});
  std::vector<apexk_copy> queue = {bench.copy(0, 0, 0, 1), bench.copy(1, 1, 1, 1), bench.copy(2, 2, 2, 1)};
  queue[1].start = bench.fake.event();
  bench.speculate(queue);
  for (int landed = 0; landed < 3;) {
    bench.stop(0);
    for (int i = 0; i < bench.stopped.landed; i++, landed++) NEED(holds(bench.slot(bench.tags[i]), bench.tags[i]), "tag %ld", (long)bench.tags[i]);
  }
  bench.clean();
  int64_t before = 0, start = 0, end = 0;
  OK(apexk_fake_event_ns(bench.done[0], &before));
  OK(apexk_fake_event_ns(queue[1].start, &start));
  OK(apexk_fake_event_ns(bench.done[1], &end));
  NEED(before <= start && start < end, "a start is recorded between the end of the copy before and its own");
}

void abandoned_slot_is_free() {
  Bench bench({.link_bytes_per_s = 200e6});
  Gate gate;
  gate.close(bench.stream);
  bench.speculate({bench.copy(0, 0, 0, 1), bench.copy(1, 1, 1, 2)});
  bench.begin();
  bench.stop(1);
  OK(apexk_channel_abandon(bench.channel, bench.stopped.running));
  apexk_copy exact = bench.copy(2, 2, 0);
  OK(bench.exact(&exact, 1));
  gate.open();
  OK(bench.fake.api.event_synchronize(bench.done[2]));
  NEED(holds(bench.slot(0), 2), "pieces of an abandoned copy came after the copy that replaced it");
  bench.land(1);
  NEED(bench.tags[0] == 1 && holds(bench.slot(1), 1), "the channel goes on after an abandoned copy");
  // nobody answers for the running copy: the next stop abandons it
  Gate second;
  second.close(bench.stream);
  bench.speculate({bench.copy(3, 3, 3, 1)});
  bench.begin();
  bench.stop(1);
  bench.stop(1);
  NEED(bench.stopped.running == -1, "running again");
  second.open();
  bench.speculate({bench.copy(4, 4, 4, 1)});
  bench.land(1);
  NEED(bench.tags[0] == 4, "landed: %ld", (long)bench.tags[0]);
}

// The thread sleeps until the caller has answered for the running copy, then goes on with the next.
void answer_wakes() {
  for (const bool keep : {true, false}) {
    Bench bench;
    {
      Gate gate;
      gate.close(bench.stream);
      bench.speculate({bench.copy(0, 0, 0, 1), bench.copy(1, 1, 1, 2)});
      bench.begin();
      bench.stop(1);
    }
    await([&] { return apexk_channel_in_flight(bench.channel) == 0; });
    sleep_ms(3);
    OK(keep ? apexk_channel_keep(bench.channel, 0, &bench.error) : apexk_channel_abandon(bench.channel, 0));
    bench.land(1);
    NEED(bench.tags[0] == 1 && holds(bench.slot(1), 1), "tag %ld", (long)bench.tags[0]);
    NEED(!keep || holds(bench.slot(0), 0), "the kept copy comes before the next");
  }
}

void failures() {
  Bench bench;
  for (const apexk_fake_call call : {APEXK_FAKE_MEMCPY, APEXK_FAKE_WAIT_EVENT}) {
    apexk_copy copies[] = {bench.copy(0, 0, 0), bench.copy(1, 1, 1), bench.copy(2, 2, 2)};
    for (apexk_copy &copy : copies) copy.after = bench.done.back();  // never recorded: waits for nothing
    apexk_fake_fail(call, 1, 700);
    NEED(bench.exact(copies, 3) == APEXK_TRANSFER_CUDA, "the second copy fails");
    NEED(copies[0].error == 0 && copies[1].error == 700 && copies[2].error == 0, "%d", copies[1].error);
    OK(bench.fake.api.event_synchronize(bench.done[2]));
    NEED(holds(bench.slot(0), 0) && holds(bench.slot(2), 2), "a failed copy took others with it");
    bench.clean();
  }
  for (const int record : {0, 1}) {  // of what all share: nobody could tell of any copy when it is there
    apexk_copy copies[] = {bench.copy(0, 0, 0), bench.copy(1, 1, 1)};
    apexk_fake_fail(APEXK_FAKE_EVENT_RECORD, record, 700);
    NEED(bench.exact(copies, 2, bench.done.back()) == APEXK_TRANSFER_CUDA && copies[0].error == 700 && copies[1].error == 700,
         "record %d: errors %d %d", record, copies[0].error, copies[1].error);
    OK(bench.fake.api.stream_synchronize(bench.stream));
    bench.clean();
  }
  apexk_copy lost[] = {bench.copy(0, 0, 0), bench.copy(1, 1, 1)};
  for (const int copy : {0, 1}) {
    apexk_fake_fail(APEXK_FAKE_MEMCPY, copy, 700);
    NEED(bench.exact(lost, 2) == APEXK_TRANSFER_CUDA && lost[copy].error == 700 && lost[1 - copy].error == 0, "copy %d", copy);
    OK(bench.fake.api.event_synchronize(bench.done[1]));
    NEED(holds(bench.slot(1 - copy), 1 - copy), "the event of both, where one failed");
    fill(bench.slot(0), 100), fill(bench.slot(1), 101);
    bench.clean();
  }
  for (const apexk_fake_call call :
       {APEXK_FAKE_MEMCPY, APEXK_FAKE_EVENT_RECORD, APEXK_FAKE_EVENT_QUERY, APEXK_FAKE_EVENT_SYNCHRONIZE}) {
    const int tag = 3 + 2 * call;
    apexk_fake_fail(call, 0, 700);
    bench.speculate({bench.copy(tag, 3, 3, 1, bench.done.back()), bench.copy(tag + 1, 4, 4, 1)});
    await([&] {  // a stop at once could meet the failure that is meant for the thread
      int64_t ns;
      return apexk_fake_event_ns(bench.done[tag + 1], &ns) == 0 && apexk_channel_in_flight(bench.channel) == 0;
    });
    bench.fake.api.get_last_error();  // "not ready"
    bench.stop(0);
    NEED(bench.stopped.landed == 1 && bench.stopped.failed == 1 && bench.tags[0] == tag + 1 && bench.tags[1] == tag && bench.stopped.error == 700,
         "call %d: landed %d failed %d error %d", call, bench.stopped.landed, bench.stopped.failed, bench.stopped.error);
    bench.clean();
  }
  Gate gate;
  gate.close(bench.stream);
  bench.speculate({bench.copy(5, 5, 5, 1)});
  bench.begin();
  sleep_ms(2);  // both pieces are issued
  bench.stop(1);
  apexk_fake_fail(APEXK_FAKE_MEMCPY, 0, 700);
  NEED(apexk_channel_keep(bench.channel, 5, &bench.error) == APEXK_TRANSFER_CUDA && bench.error == 700, "keep fails: %d", bench.error);
  bench.clean();
  gate.open();
}

void refusals() {
  Bench bench({}, 2);
  apexk_copy bad = bench.copy(0, 0, 0);
  bad.bytes = 0;
  NEED(bench.exact(&bad, 1) == APEXK_TRANSFER_BAD_ARGUMENT, "no bytes");
  NEED(apexk_channel_keep(bench.channel, 0, &bench.error) == APEXK_TRANSFER_BAD_ARGUMENT, "nothing runs");
  std::vector<apexk_copy> three = {bench.copy(0, 0, 0), bench.copy(1, 1, 1), bench.copy(2, 2, 2)};
  NEED(apexk_channel_speculate(bench.channel, three.data(), 3) == APEXK_TRANSFER_FULL, "three in a queue of two");
  bench.speculate({three[0], three[1]});
  bench.land(2);
  apexk_channel *none = nullptr;
  apexk_fake_fail(APEXK_FAKE_EVENT_CREATE, 1, 2);
  NEED(apexk_channel_create(&bench.fake.api, 0, bench.stream, kChunk, 2, &none, &bench.error) == APEXK_TRANSFER_CUDA && bench.error == 2 && !none,
       "no event: %d", bench.error);
  NEED(apexk_fake_count(APEXK_FAKE_EVENTS) == kTags + 2, "an event was left: %ld", (long)apexk_fake_count(APEXK_FAKE_EVENTS));
  bench.clean();
}

// Afterwards nothing writes: the memory may be given back.
void destroy_waits() {
  for (const bool exact : {true, false}) {
    Bench bench({.link_bytes_per_s = 2e6});
    apexk_copy copy = bench.copy(0, 0, 0, 1);
    if (exact) {
      OK(bench.exact(&copy, 1));
    } else {
      bench.speculate({copy, bench.copy(1, 1, 1, 1)});
      bench.begin();
    }
    apexk_channel_destroy(bench.channel);
    bench.channel = nullptr;
    fill(bench.slot(0), 50);
    sleep_ms(12);
    NEED(holds(bench.slot(0), 50) && holds(bench.slot(1), 101), "a slot was written after the channel was destroyed");
  }
}

void sleeps_when_idle() {
  Bench bench;
  bench.speculate({bench.copy(0, 0, 0, 1)});
  bench.land(1);
  NEED(idle_cpu_share() < 0.1, "the thread does not sleep with nothing to do");
  Gate gate;
  gate.close(bench.stream);
  bench.speculate({bench.copy(1, 1, 1, 1), bench.copy(2, 2, 2, 1)});
  bench.begin();
  bench.stop(1);
  NEED(idle_cpu_share() < 0.3, "the thread does not sleep while it owes nothing");  // the gate looks a thousand times a second
  gate.open();
  OK(apexk_channel_abandon(bench.channel, 1));
}

// Pieces are issued by a thread that has told CUDA its device.
void device_is_set() {
  static thread_local bool set = false;
  static std::atomic<int> strangers;
  static decltype(apexk_cuda_api::memcpy_async) inner;
  Bench bench;
  apexk_cuda_api api = bench.fake.api;
  strangers = 0;
  inner = api.memcpy_async;
  api.set_device = [](int device) {
    set = device == 0;
    return 0;
  };
  api.memcpy_async = [](void *dst, const void *src, size_t bytes, int kind, apexk_stream stream) {
    strangers += !set;
    return inner(dst, src, bytes, kind, stream);
  };
  apexk_channel_destroy(bench.channel);
  OK(apexk_channel_create(&api, 0, bench.stream, kChunk, kTags, &bench.channel, &bench.error));
  bench.speculate({bench.copy(0, 0, 0, 1)});
  bench.land(1);
  NEED(strangers == 0, "%d pieces were issued by a thread without a device", strangers.load());
}

void allocates_nothing() {
  Bench bench;
  apexk_copy one[] = {bench.copy(0, 0, 0, 1)}, two[] = {bench.copy(1, 1, 1)};
  auto round = [&] {
    OK(apexk_channel_speculate(bench.channel, one, 1));
    OK(bench.exact(two, 1));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    bench.stop(1);
    if (bench.stopped.running >= 0) OK(apexk_channel_keep(bench.channel, 0, &bench.error));
    OK(bench.fake.api.stream_synchronize(bench.stream));
  };
  round();
  const long before = allocations, made = apexk_fake_count(APEXK_FAKE_MADE);
  for (int i = 0; i < 50; i++) round();
  NEED(allocations == before && apexk_fake_count(APEXK_FAKE_MADE) == made, "%ld allocations", allocations - before);
}

}  // namespace

std::vector<Scenario> channel_scenarios() {
  return {
      {"exact", exact_copies},
      {"write_after_read", write_after_read},
      {"dropped", copies_that_wait_can_be_dropped},
      {"newest_first", newest_queue_first},
      {"overtaken", overtaken_within_a_chunk},
      {"landed", landed_is_there},
      {"abandoned", abandoned_slot_is_free},
      {"answered", answer_wakes},
      {"copy_failures", failures},
      {"copy_refusals", refusals},
      {"destroy", destroy_waits},
      {"channel_idle", sleeps_when_idle},
      {"device", device_is_set},
      {"churn", churn},
      {"no_allocation", allocates_nothing},
  };
}
