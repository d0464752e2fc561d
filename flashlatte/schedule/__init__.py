"""How requests are split over the parts of a GPU."""

from flashlatte.schedule.split import SplitSchedule, split_schedule

__all__ = ["SplitSchedule", "split_schedule"]
