// Memory that only grows until it is taken back as a whole, and is kept for the next call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace adacomp::cpu {

template <typename T>
class Arena {
 public:
  void clear() { size_ = 0; }
  int64_t size() const { return size_; }
  int64_t capacity() const { return capacity_; }
  void release() { *this = Arena(); }
  T* at(int64_t offset) { return data_.get() + offset; }

  // Room for `count` more, uninitialised; grow() then makes those that were used part of it.
  T* reserve(int64_t count) {
    if (size_ + count > capacity_) {
      const int64_t capacity = std::max(2 * capacity_, size_ + count);
      std::unique_ptr<T[]> data(new T[capacity]);
      if (size_ > 0) std::memcpy(data.get(), data_.get(), size_ * sizeof(T));
      data_ = std::move(data);
      capacity_ = capacity;
    }
    return at(size_);
  }
  void grow(int64_t count) { size_ += count; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

}  // namespace adacomp::cpu
