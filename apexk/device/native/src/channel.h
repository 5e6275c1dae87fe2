// The copies of one stream, in one order: exact ones by the calling thread, speculative ones by a thread, piece by piece.
#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "apexk_transfer.h"

namespace apexk {

class Channel {
 public:
  // Throws std::bad_alloc, std::system_error; `error` gets the code of a failed CUDA call, and the channel is then unusable.
  Channel(const apexk_cuda_api &api, int device, apexk_stream stream, uint64_t chunk_bytes, size_t capacity, int *error);
  ~Channel();

  bool copy(apexk_copy *copies, int count, apexk_event start, apexk_event done);  // false: some failed
  bool speculate(const apexk_copy *copies, int count);                            // false: no place
  void stop(int layer, int64_t *tags, apexk_stopped *stopped);
  bool keep(int64_t tag, int *error);  // false: no such copy
  bool abandon(int64_t tag);
  uint64_t in_flight();

 private:
  static constexpr uint64_t kAhead = 2;  // pieces under way: the link never waits for the thread within a copy

  struct Begun {  // the speculative copy that has begun and not landed
    apexk_copy copy;
    uint64_t first_piece, issued, landed;  // a piece's number; bytes
  };

  void serve();
  bool may_begin(std::unique_lock<std::mutex> &lock);
  void issue_pieces();
  void await_piece(std::unique_lock<std::mutex> &lock);
  void settle_piece(int status);
  int issue(const apexk_copy &copy, uint64_t from, uint64_t bytes);
  int move(const apexk_copy &copy, uint64_t from, uint64_t bytes);
  void fail(int status);
  int checked(int status);
  void destroy_paces();

  const apexk_cuda_api api_;
  const int device_;
  const apexk_stream stream_;
  const uint64_t piece_bytes_;
  const size_t capacity_;

  std::mutex mutex_;  // guards all that follows
  std::condition_variable news_;
  std::vector<apexk_copy> queue_;  // the last one is next
  std::vector<int64_t> landed_, failed_;
  int last_error_ = 0;
  bool has_begun_ = false, held_ = false, stopping_ = false;  // held: the caller owes keep or abandon
  Begun begun_{};
  uint64_t issued_ = 0, settled_ = 0;  // pieces, ever
  apexk_event paces_[kAhead] = {};     // recorded behind piece n: paces_[n % kAhead]
  uint64_t sizes_[kAhead] = {};
  std::thread thread_;
};

}  // namespace apexk
