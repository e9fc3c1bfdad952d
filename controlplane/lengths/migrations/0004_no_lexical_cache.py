from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("lengths", "0003_no_training_rows")]

    operations = [
        migrations.AlterField(model, name, models.CharField(help_text=text, max_length=40))
        for model, name, text in (
            ("LengthMinute", "predictor", "cache, prior, a version, or its shadow."),
            ("LengthSample", "predicted_by", "cache, prior, or a version."),
        )
    ]
